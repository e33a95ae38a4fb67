# SPDX-License-Identifier: Apache-2.0
"""The kinds of problem: each story draws numbers and writes question and solution.

Needs the standard library only, and draws through `random.Random.random()` alone, so
that the text is the same on every Python version.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

MAX_VALUE = 99999

NAMES = [
    ("Ada", "She"), ("Ben", "He"), ("Carla", "She"), ("David", "He"), ("Emma", "She"),
    ("Felix", "He"), ("Grace", "She"), ("Hugo", "He"), ("Iris", "She"), ("Jack", "He"),
    ("Karen", "She"), ("Leo", "He"), ("Maria", "She"), ("Noah", "He"),
    ("Olivia", "She"), ("Peter", "He"), ("Quinn", "She"), ("Robert", "He"),
    ("Sara", "She"), ("Tom", "He"), ("Uma", "She"), ("Victor", "He"), ("Wendy", "She"),
    ("Xavier", "He"), ("Yara", "She"), ("Zane", "He"),
]  # fmt: skip
THINGS = [
    "apples", "marbles", "stickers", "pencils", "books", "cookies", "shells", "coins",
    "cards", "beads", "stamps", "balloons", "buttons", "candles", "crayons", "toys",
    "oranges", "muffins", "flowers", "stones", "ribbons", "magnets", "badges", "pens",
]  # fmt: skip
GOODS = [
    "notebooks", "sandwiches", "shirts", "tickets", "mugs", "lamps", "caps", "plates",
    "brushes", "puzzles", "belts", "scarves", "posters", "bottles", "plants", "bags",
]  # fmt: skip
BOXES = ["boxes", "bags", "crates", "baskets", "packs", "jars"]
TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}
PARTS = {2: "half", 3: "one third", 4: "one quarter", 5: "one fifth", 10: "one tenth"}


class Unsuitable(Exception):
    """The drawn numbers leave 1..99999 or do not divide; draw again."""


class Draft:
    """One problem being written: question sentences and solution steps."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self.sentences: list[str] = []
        self.lines: list[str] = []

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self._rng.random() * len(options))]

    def number(self, low: int, high: int) -> int:
        """Return an integer from low to high, both included."""
        return low + int(self._rng.random() * (high - low + 1))

    def people(self, count: int) -> list[tuple[str, str]]:
        """Return `count` different (name, pronoun) pairs."""
        chosen: list[tuple[str, str]] = []
        while len(chosen) < count:
            person = self.pick(NAMES)
            if person not in chosen:
                chosen.append(person)
        return chosen

    def say(self, *variants: str) -> None:
        """Add one of the wordings to the question."""
        self.sentences.append(self.pick(variants))

    def step(self, lead: str, a: int, op: str, b: int, tail: str) -> int:
        """Add the line `lead a op b = <<a op b=r>>r tail.` and return r.

        Raises:
            Unsuitable: r is not an integer from 1 to 99999.
        """
        if op == "/" and a % b:
            raise Unsuitable
        result = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[op]
        if not 1 <= result <= MAX_VALUE:
            raise Unsuitable
        unit = f" {tail}" if tail else ""
        money = "$" if lead.endswith("$") else ""
        lead = lead.removesuffix("$").rstrip()
        expr = f"{a}{op}{b}"
        self.lines.append(
            f"{lead} {money}{expr} = {money}<<{expr}={result}>>{result}{unit}."
        )
        return result


def chain(d: Draft) -> int:
    """A quantity that changes two to four times."""
    (name, he), thing = d.people(1)[0], d.pick(THINGS)
    has = d.number(5, 5000)
    d.say(f"{name} has {has} {thing}.", f"{name} starts with {has} {thing}.")
    for _ in range(d.number(2, 4)):
        has = d.pick(CHANGES)(d, he, thing, has)
    d.say(
        f"How many {thing} does {name} have now?",
        f"How many {thing} does {name} have in the end?",
    )
    return has


def _gain(d: Draft, he: str, thing: str, has: int) -> int:
    n = d.number(3, 4000)
    d.say(f"{he} buys {n} more.", f"{he} finds another {n} {thing}.")
    return d.step(f"{he} then has", has, "+", n, thing)


def _gain_packs(d: Draft, he: str, thing: str, has: int) -> int:
    box, m, k = d.pick(BOXES), d.number(2, 40), d.number(3, 99)
    d.say(
        f"{he} gets {m} {box} with {k} {thing} in each.",
        f"Then {he.lower()} buys {m} {box} of {k} {thing}.",
    )
    new = d.step(f"The {box} hold", m, "*", k, thing)
    return d.step(f"{he} then has", has, "+", new, thing)


def _lose(d: Draft, he: str, thing: str, has: int) -> int:
    n = d.number(2, 3000)
    d.say(
        f"{he} loses {n} of them.", f"{he} gives away {n} {thing}.", f"{he} sells {n}."
    )
    return d.step(f"{he} has", has, "-", n, f"{thing} left")


def _lose_each(d: Draft, he: str, thing: str, has: int) -> int:
    n, k = d.number(2, 24), d.number(2, 60)
    d.say(f"{he} gives {k} {thing} to each of {n} friends.")
    gone = d.step(f"{he} gives away", n, "*", k, thing)
    return d.step(f"{he} has", has, "-", gone, f"{thing} left")


def _grow(d: Draft, he: str, thing: str, has: int) -> int:
    k = d.pick(tuple(TIMES))
    d.say(f"After a month {he.lower()} has {TIMES[k]} as many {thing}.")
    return d.step(f"{he} then has", has, "*", k, thing)


def _part(d: Draft, he: str, thing: str, has: int) -> int:
    k = d.pick(tuple(PARTS))
    d.say(f"{he} gives {PARTS[k]} of the {thing} away.")
    gone = d.step(f"{he} gives away", has, "/", k, thing)
    return d.step(f"{he} has", has, "-", gone, f"{thing} left")


CHANGES = (_gain, _gain_packs, _lose, _lose_each, _grow, _part)


def comparison(d: Draft) -> int:
    """Two or three people, each known relative to the one before."""
    people, thing = d.people(d.number(2, 3)), d.pick(THINGS)
    amounts = [d.number(4, 2000)]
    clauses = [f"{people[0][0]} has {amounts[0]} {thing}."]
    for (other, _), (name, _) in itertools.pairwise(people):
        if d.number(0, 1):
            k = d.number(2, 5)
            clauses.append(f"{name} has {TIMES[k]} as many {thing} as {other}.")
            op, n = "*", k
        else:
            op, n = d.pick("+-"), d.number(2, 1500)
            word = "more" if op == "+" else "fewer"
            clauses.append(f"{name} has {n} {word} {thing} than {other}.")
        amounts.append(d.step(f"{name} has", amounts[-1], op, n, thing))
    # the facts may come in reverse, so that the order to compute in must be found
    d.say(" ".join(clauses), " ".join(reversed(clauses)))
    if len(people) == 2 and amounts[0] != amounts[1] and d.number(0, 1):
        more, less = (0, 1) if amounts[0] > amounts[1] else (1, 0)
        d.say(
            f"How many more {thing} does {people[more][0]} have than {people[less][0]}?"
        )
        return d.step("The difference is", amounts[more], "-", amounts[less], thing)
    d.say(
        f"How many {thing} do they have together?",
        f"How many {thing} are there in all?",
    )
    total = amounts[0]
    for amount in amounts[1:]:
        total = d.step("Together that is", total, "+", amount, thing)
    return total


def shopping(d: Draft) -> int:
    """Two kinds of goods, and perhaps the change."""
    name, he = d.people(1)[0]
    first, second = d.pick(GOODS), d.pick(GOODS)
    if first == second:
        raise Unsuitable
    n, p, m, q = d.number(2, 60), d.number(2, 300), d.number(2, 60), d.number(2, 300)
    d.say(
        f"{name} buys {n} {first} at ${p} each and {m} {second} at ${q} each.",
        f"{first.capitalize()} cost ${p} and {second} cost ${q}. "
        f"{name} buys {n} {first} and {m} {second}.",
    )
    a = d.step(f"The {first} cost $", n, "*", p, "")
    b = d.step(f"The {second} cost $", m, "*", q, "")
    total = d.step("Together they cost $", a, "+", b, "")
    if d.number(0, 1):
        paid = (total // 50 + d.number(1, 3)) * 50
        d.say(f"{he} pays with ${paid}. How much change does {he.lower()} get?")
        return d.step(f"{he} gets back $", paid, "-", total, "")
    d.say(f"How many dollars does {name} spend?", "What is the total price in dollars?")
    return total


def earnings(d: Draft) -> int:
    """Wages over hours and days, less an expense."""
    name, he = d.people(1)[0]
    rate, hours, days = d.number(6, 95), d.number(2, 12), d.number(2, 12)
    d.say(
        f"{name} earns ${rate} an hour and works {hours} hours a day for {days} days.",
        f"{name} works {days} days, {hours} hours each day, "
        f"and is paid ${rate} per hour.",
    )
    total_hours = d.step(f"{name} works", hours, "*", days, "hours")
    pay = d.step(f"{he} earns $", total_hours, "*", rate, "")
    spent = d.number(5, 3000)
    d.say(
        f"{he} spends ${spent} on food.", f"Then {he.lower()} pays ${spent} for a trip."
    )
    left = d.step(f"{he} keeps $", pay, "-", spent, "")
    k = d.number(2, 8)
    if left % k == 0:
        d.say(
            f"{he} splits the rest equally over {k} weeks. How much is that per week?"
        )
        return d.step("Per week that is $", left, "/", k, "")
    d.say(f"How many dollars does {he.lower()} have left?")
    return left


def packing(d: Draft) -> int:
    """Boxes of things, some spoiled, the rest shared."""
    (name, he), thing, box = d.people(1)[0], d.pick(THINGS), d.pick(BOXES)
    n, k, friends = d.number(3, 60), d.number(6, 99), d.number(2, 12)
    total = d.step("There are", n, "*", k, thing)
    broken = total % friends + friends * d.number(0, 4)
    if broken == 0:
        raise Unsuitable
    d.say(
        f"{name} has {n} {box} with {k} {thing} in each, "
        f"but {broken} {thing} are broken.",
        f"{name} receives {n} {box} of {k} {thing}. {he} throws away {broken} of them.",
    )
    good = d.step("That leaves", total, "-", broken, thing)
    d.say(f"{he} shares the rest equally among {friends} friends.")
    d.say(f"How many {thing} does each friend get?")
    return d.step("Each friend gets", good, "/", friends, thing)


def reading(d: Draft) -> int:
    """A task done at one pace, then finished at another."""
    name, he = d.people(1)[0]
    pace, days, later = d.number(6, 250), d.number(2, 20), d.number(2, 12)
    done = d.step(f"{name} reads", pace, "*", days, "pages")
    pages = done + later * d.number(4, 150)
    d.say(
        f"{name} reads a book with {pages} pages.",
        f"A book of {name} has {pages} pages.",
    )
    d.say(f"{he} reads {pace} pages a day for {days} days.")
    left = d.step("There remain", pages, "-", done, "pages")
    d.say(
        f"{he} wants to finish in {later} more days. "
        f"How many pages a day must {he.lower()} read?"
    )
    return d.step(f"{he} must read", left, "/", later, "pages a day")


def savings(d: Draft) -> int:
    """How many weeks until something can be bought."""
    (name, he), good = (
        d.people(1)[0],
        d.pick(("bike", "phone", "guitar", "camera", "desk")),
    )
    weekly, weeks, start = d.number(4, 95), d.number(3, 60), d.number(5, 900)
    gift = d.number(5, 400)
    price = weekly * weeks + start + gift
    if price > MAX_VALUE:
        raise Unsuitable
    d.say(f"A {good} costs ${price}.", f"{name} wants a {good} that costs ${price}.")
    d.say(f"{name} has ${start} and gets ${gift} from an aunt.")
    have = d.step(f"{name} has $", start, "+", gift, "")
    need = d.step(f"{he} still needs $", price, "-", have, "")
    d.say(
        f"If {name} saves ${weekly} a week, "
        f"after how many weeks can {he.lower()} buy the {good}?"
    )
    return d.step("That takes", need, "/", weekly, "weeks")


def farm(d: Draft) -> int:
    """Daily produce, some kept, the rest packed or sold."""
    name, he = d.people(1)[0]
    hens, eggs, per_box = d.number(4, 400), d.number(2, 7), d.pick((4, 6, 10, 12, 24))
    total = d.step("The hens lay", hens, "*", eggs, "eggs")
    kept = total % per_box + per_box * d.number(0, 2)
    if kept == 0:
        raise Unsuitable
    d.say(f"{name} has {hens} hens and each lays {eggs} eggs a week.")
    d.say(f"{he} keeps {kept} eggs and packs the rest in boxes of {per_box}.")
    rest = d.step(f"{he} packs", total, "-", kept, "eggs")
    boxes = d.step("That makes", rest, "/", per_box, "boxes")
    if d.number(0, 1):
        price = d.number(2, 30)
        d.say(
            f"A box sells for ${price}. "
            f"How many dollars does {he.lower()} earn in a week?"
        )
        return d.step(f"{he} earns $", boxes, "*", price, "")
    d.say("How many boxes are filled in a week?")
    return boxes


def travel(d: Draft) -> int:
    """Two legs of a trip, and perhaps what remains."""
    (name, he), vehicle = d.people(1)[0], d.pick(("car", "train", "bus", "van"))
    v, t, w, u = d.number(20, 95), d.number(2, 24), d.number(20, 95), d.number(2, 24)
    d.say(
        f"{name} travels by {vehicle} at {v} miles an hour for {t} hours, "
        f"then at {w} miles an hour for {u} hours."
    )
    a = d.step("The first part is", v, "*", t, "miles")
    b = d.step("The second part is", w, "*", u, "miles")
    total = d.step("Together that is", a, "+", b, "miles")
    if d.number(0, 1):
        far = total + d.number(5, 900)
        d.say(f"The whole trip is {far} miles. How many miles are left?")
        return d.step("There remain", far, "-", total, "miles")
    d.say(f"How many miles does {he.lower()} travel?", "How long is the trip in miles?")
    return total


def ages(d: Draft) -> int:
    """Ages relative to each other, some years later."""
    (a, _), (b, _), (c, _) = d.people(3)
    age, less, k, years = (
        d.number(8, 60),
        d.number(2, 30),
        d.number(2, 4),
        d.number(2, 30),
    )
    d.say(
        f"{a} is {age} years old. {b} is {less} years younger than {a}. "
        f"{c} is {TIMES[k]} as old as {b}.",
        f"{c} is {TIMES[k]} as old as {b}, and {b} is {less} years younger than {a}, "
        f"who is {age}.",
    )
    second = d.step(f"{b} is", age, "-", less, "years old")
    third = d.step(f"{c} is", second, "*", k, "years old")
    if third + years > 110:
        raise Unsuitable
    d.say(f"How old will {c} be in {years} years?")
    return d.step(f"{c} will be", third, "+", years, "years old")


def school(d: Draft) -> int:
    """A group, a part of it, and the rest in equal teams."""
    classes, each, k = d.number(2, 60), d.number(12, 48), d.pick(tuple(PARTS))
    total = d.step("There are", classes, "*", each, "students")
    away = d.step("On the trip are", total, "/", k, "students")
    rest = d.step("That leaves", total, "-", away, "students")
    d.say(
        f"A school has {classes} classes of {each} students.",
        f"In a school there are {classes} classes with {each} students each.",
    )
    d.say(f"Today {PARTS[k]} of the students are on a trip.")
    teams = d.number(2, 12)
    if rest % teams == 0:
        d.say(f"The others form {teams} equal teams. How many students are in a team?")
        return d.step("A team has", rest, "/", teams, "students")
    d.say("How many students are not on the trip?")
    return rest


STORIES: tuple[Callable[[Draft], int], ...] = (
    chain, chain, chain, comparison, comparison, shopping, earnings, packing, reading,
    savings, farm, travel, ages, school,
)  # fmt: skip
