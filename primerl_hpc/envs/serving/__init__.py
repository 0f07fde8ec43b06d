"""Adaptations of verifiers' environment server, most of which make it cheaper; used by `roles.env_server` only, except
for `deferred`.

Reading order: deferred (imports that most runs do not need) → server (one message with each episode, uvloop) →
games (word lists are read once) → in_process (model calls without HTTP) → token_client (tokens from the engines as
arrays) → tokenizers (loaded once, without torch) → context_limits (a conversation that fills the context ends, and is
scored) → token_limits (the name of a limit that an external server accepts) → own_user (other users of the node cannot
connect).
"""
