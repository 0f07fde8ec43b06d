"""Adaptations that make verifiers' environment server cheaper; used by `roles.env_server` only, except for `deferred`.

Reading order: deferred (imports that most runs do not need) → server (one message with each episode, uvloop) →
short_calls (no thread for what is short) → lookups (results of lookups are kept between rollouts) → games (word lists
likewise) → in_process (model calls without HTTP) → token_client (tokens from the engines as arrays) → tokenizers
(loaded once, without torch).
"""
