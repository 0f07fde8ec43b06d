"""Attacks by other users, colleagues and hostile data that a run resists (docs/security.md).

`test_sockets`: other users at its ports. `test_listeners`: addresses that its processes listen on.
`test_hostile_files`: binary and JSON formats. `test_hostile_images`: images in messages. `test_hostile_logs`: log
lines. `test_hostile_text`: characters in recipes, profiles, templates and paths. `test_control_tokens`: text that
would become control tokens. `test_chat_templates`: templates in requests. `test_judges`: judges of third parties.
`test_custom_code`: code that a recipe names. `test_files`: files of other users. `test_temporary`: temporary folders
and caches. `test_secrets`: secrets in configurations and environments. `test_advisories`: pinned versions and
recorded advisories.
"""
