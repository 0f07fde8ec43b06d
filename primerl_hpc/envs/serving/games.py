"""Word lists of textarena's games are read once for each process.

    share_word_lists("textarena")      # in an environment server, before verifiers serves

textarena 0.7.4 reads its dictionaries again for each game, 0.7 s of a core in which the event loop serves no other
episode, and tries to download nltk's word list again. nltk 3.10 reads its tagger from disk for each call, and a game
calls it for each word of the list of secret words.
"""

from __future__ import annotations

import functools
from importlib import import_module

from primerl_hpc.envs.lookup import module_of

_READERS = (("textarena.envs.utils.word_lists", "EnglishDictionary"), ("nltk.tag", "_get_tagger"))


def share_word_lists(environment_id: str) -> None:
    """Patch textarena and nltk in this process, if the environment is textarena's. Games only read what they share."""
    if module_of(environment_id) != "textarena":
        return
    for module, name in _READERS:  # optional packages, of verifiers[ta]
        loaded = import_module(module)
        setattr(loaded, name, functools.cache(getattr(loaded, name)))
