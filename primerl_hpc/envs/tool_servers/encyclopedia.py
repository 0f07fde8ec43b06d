"""An invented encyclopedia of towns: articles, and questions whose answers are in one or two of them.

    articles = write_articles(num_articles=400, seed=0)
    question = ask(articles, random.Random(3))

Names are drawn from syllables, so no model knows the answers: it must search. Equal arguments give equal articles.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

_SYLLABLES = (
    *("ba", "be", "bo", "da", "de", "dor", "fa", "fel", "go", "ha", "hel", "ka", "ken", "lo", "lun", "ma"),
    *("mir", "na", "nor", "o", "pel", "ra", "ren", "sa", "sol", "ta", "tor", "va", "ven", "wil", "zu"),
)
_TRADES = (
    *("glass blowing", "bell casting", "paper making", "rope making", "clock making"),
    *("salt mining", "ship building", "weaving", "bee keeping", "dyeing"),
)
_DISHES = (
    *("plum soup", "rye dumplings", "smoked trout", "pear bread", "bean stew"),
    *("onion cake", "apple cheese", "lentil pie", "barley pudding", "fish soup"),
)


@dataclass(frozen=True)
class Town:
    name: str
    river: str
    mayor: str
    founded: int
    population: int
    trade: str
    dish: str
    twin: str
    """Name of another town of the encyclopedia."""

    @property
    def text(self) -> str:
        return (
            f"{self.name} is a town on the river {self.river}. It was founded in {self.founded} and has "
            f"{self.population} inhabitants. Its mayor is {self.mayor}. {self.name} is known for {self.trade}, and its "
            f"best-known dish is {self.dish}. Its twin town is {self.twin}."
        )


@dataclass(frozen=True)
class Question:
    text: str
    answer: str


def write_articles(num_articles: int, seed: int) -> list[Town]:
    """Return the towns in alphabetical order. Names of towns, rivers and mayors are distinct."""
    rng = random.Random(seed)
    used: set[str] = set()
    names = [_new_name(rng, used, 2) for _ in range(num_articles)]
    towns = []
    for position, name in enumerate(names):
        mayor = f"{_new_name(rng, used, 2)} {_new_name(rng, used, 3)}"
        towns.append(
            Town(
                name=name,
                river=_new_name(rng, used, 2),
                mayor=mayor,
                founded=rng.randint(900, 1899),
                population=rng.randint(900, 99_000),
                trade=rng.choice(_TRADES),
                dish=rng.choice(_DISHES),
                twin=_other_name(rng, names, position),
            )
        )
    return sorted(towns, key=lambda town: town.name)


def ask(towns: list[Town], rng: random.Random) -> Question:
    """Return a question about one town, or about the twin of a town, which takes two articles."""
    town = rng.choice(towns)
    known = rng.choice([f"the mayor is {town.mayor}", f"the river is called {town.river}"])
    subject, described = f"the town of which {known}", town
    if rng.random() < 0.5:
        subject = f"the twin town of {subject}"
        described = next(other for other in towns if other.name == town.twin)
    attribute, answer = rng.choice(
        [
            ("In which year was {} founded?", str(described.founded)),
            ("How many inhabitants has {}?", str(described.population)),
            ("Who is the mayor of {}?", described.mayor),
            ("For which trade is {} known?", described.trade),
            ("What is the best-known dish of {}?", described.dish),
        ]
    )
    return Question(attribute.format(subject), answer)


def _other_name(rng: random.Random, names: list[str], position: int) -> str:
    """Draw one of the names other than that at ``position``."""
    index = rng.randrange(len(names) - 1)
    return names[index + (index >= position)]


def _new_name(rng: random.Random, used: set[str], num_syllables: int) -> str:
    """Draw a name that is not in ``used``, and add it. Names become longer when the short ones are exhausted."""
    for attempt in range(1000):
        name = "".join(rng.choice(_SYLLABLES) for _ in range(num_syllables + attempt // 50)).capitalize()
        if name not in used:
            used.add(name)
            return name
    raise AssertionError("names grow with each attempt")
