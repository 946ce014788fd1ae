"""Generated word problems with a worked solution, in GSM8K's manner, and their exact graders.

    ann has 12 shells . monday she finds 4 . tuesday if even she sells 3 . how many shells does ann have now ?
    -> monday ann quickly picks 4 old shells up so 12 + 4 = 16 .
       tuesday ann has 16 shells clearly even now so 16 - 3 = 13 . the answer is 13 . <|eos|>

Every step starts from the result of the one before, so an early error makes the rest wrong. Whether a condition holds
can be guessed (it does in seven of ten) before it can be computed, which is where parallel commits make errors.
Wording is free where a `Slot` has several options.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from asrd.lab.tiny import language as lang
from asrd.lab.tiny.language import EOS_ID, ID, VOCABULARY, Slot

BLOCK = 32
TOP = 24  # the largest quantity
AMOUNTS = range(2, 7)
P_TAKE_ODD = 0.43  # share of the conditions that do not hold that is kept, so that seven in ten hold
TEST_SHARE = 10  # one question in ten is held out
SCORING_FROM = 10_000_000  # scores use seeds from here on; learning curves, by which training is stopped, lower ones


KINDS = {"gain": 0.3, "lose": 0.2, "condition": 0.3, "double": 0.1, "half": 0.1}


@dataclass(frozen=True)
class Level:
    steps: int
    start: range  # of the first quantity; wide on the easy level, to include every sum


LEVELS = {"easy": Level(1, range(2, TOP + 1)), "medium": Level(3, range(4, 16)), "hard": Level(6, range(4, 16))}


@dataclass(frozen=True)
class Step:
    kind: str
    before: int
    after: int
    amount: int = 0


@dataclass(frozen=True)
class Problem:
    """`slots` describes every valid response; `response` is the one sampled with the problem, with one EOS."""

    level: str
    seed: int
    question: str
    steps: tuple[Step, ...]
    slots: tuple[Slot, ...]
    response: tuple[str, ...]

    @property
    def answer(self) -> int:
        return self.steps[-1].after

    @property
    def solution(self) -> str:
        return " ".join(self.response)

    @property
    def response_length(self) -> int:
        """Tokens to generate: the response filled up with end-of-text to whole blocks (hard: 96, nothing to fill)."""
        return -(-len(self.response) // BLOCK) * BLOCK

    @property
    def block_length(self) -> int:
        """Tokens of a block."""
        return BLOCK

    @property
    def free(self) -> list[bool]:
        """For each token of the response: True where several words are right."""
        free = [slot.is_free for slot in self.slots]
        return free + [False] * (self.response_length - len(free))

    def is_right(self, response: str | Sequence[int]) -> bool:
        """See `grade`."""
        return grade(self, response)

    def wrong_tokens(self, response: Sequence[int]) -> list[bool]:
        """See `token_errors`."""
        return token_errors(self, response)

    @property
    def question_ids(self) -> list[int]:
        return [ID[word] for word in self.question.split()]

    @property
    def response_ids(self) -> list[int]:
        ids = [ID[word] for word in self.response]
        return ids + [EOS_ID] * (self.response_length - len(ids))


def generate(seed: int, level: str = "hard") -> Problem:
    """The problem of this seed and level; deterministic."""
    if level not in LEVELS:
        raise ValueError(f"level={level!r}; it must be one of {', '.join(LEVELS)}")
    rng = random.Random(f"{level}/{seed}")
    she, her, names = ("she", "her", lang.GIRLS) if rng.random() < 0.5 else ("he", "his", lang.BOYS)
    name = rng.choice(names)
    thing = rng.choice(lang.THINGS)
    start = rng.choice(LEVELS[level].start)
    question = [f"{name} has {start} {thing} ."]
    slots: list[Slot] = []
    steps: list[Step] = []
    now, subject_at = start, None
    for day in lang.DAYS[: LEVELS[level].steps]:
        step = _draw_step(rng, now)
        question.append(_ask(rng, step, day, she))
        subject = Slot((name, she), (0.5, 0.5), follows=subject_at)
        at = len(slots)
        slots += _tell(step, day, subject, her, thing, at)
        if step.kind in ("gain", "lose", "condition"):
            subject_at = subject_at if subject_at is not None else at + 1
        steps.append(step)
        now = step.after
    question.append(f"how many {thing} does {name} have now ?")
    slots += lang.closing(now)
    return Problem(level, seed, " ".join(question), tuple(steps), tuple(slots), _choose_words(rng, slots))


def _draw_step(rng: random.Random, now: int) -> Step:
    while True:
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        amount = rng.choice(AMOUNTS)
        if kind == "gain" and now + amount <= TOP:
            return Step(kind, now, now + amount, amount)
        if kind == "lose" and now - amount >= 1:
            return Step(kind, now, now - amount, amount)
        if kind == "double" and 2 <= now <= TOP // 2:
            return Step(kind, now, 2 * now)
        if kind == "half" and now % 2 == 0 and now >= 4:
            return Step(kind, now, now // 2)
        if kind == "condition" and now - amount >= 1:
            if now % 2 == 0:
                return Step(kind, now, now - amount, amount)
            if rng.random() < P_TAKE_ODD:
                return Step(kind, now, now, amount)


def _ask(rng: random.Random, step: Step, day: str, she: str) -> str:
    if step.kind == "double":
        return f"{day} they double ."
    if step.kind == "half":
        return f"{day} half get lost ."
    verb = rng.choice(lang.QUESTION_VERBS["gain" if step.kind == "gain" else "lose"])
    condition = "if even " if step.kind == "condition" else ""
    return f"{day} {condition}{she} {verb} {step.amount} ."


def _tell(step: Step, day: str, subject: Slot, her: str, thing: str, at: int) -> list[Slot]:
    if step.kind == "double":
        return lang.double_sentence(day, her, thing, step.before, step.after)
    if step.kind == "half":
        return lang.half_sentence(day, her, thing, step.before, step.after)
    if step.kind == "condition":
        return lang.condition_sentence(day, subject, step.amount, thing, step.before, step.after)
    return lang.change_sentence(day, subject, step.kind, step.amount, thing, step.before, step.after, at)


def _choose_words(rng: random.Random, slots: Sequence[Slot]) -> tuple[str, ...]:
    chosen: list[int] = []
    for slot in slots:
        if slot.follows is not None:
            chosen.append(chosen[slot.follows])
        else:
            chosen.append(rng.choices(range(len(slot.options)), slot.weights)[0] if slot.is_free else 0)
    return tuple(slot.options[index] for slot, index in zip(slots, chosen, strict=True))


def split(problem: Problem) -> str:
    """`"test"` or `"train"`, by a hash of the question, so that no question is in both."""
    digest = hashlib.sha256(problem.question.encode()).digest()
    return "test" if int.from_bytes(digest[:4], "big") % TEST_SHARE == 0 else "train"


def problems(which: str, level: str = "hard", first_seed: int = 0) -> Iterator[Problem]:
    """The problems of one split (`"train"` or `"test"`) in the order of their seeds; infinite."""
    if which not in ("train", "test"):
        raise ValueError(f"which={which!r}; it must be 'train' or 'test'")
    seed = first_seed
    while True:
        problem = generate(seed, level)
        if split(problem) == which:
            yield problem
        seed += 1


def held_out(count: int, level: str = "hard", first: int = 0) -> list[Problem]:
    """`count` of the problems on which decoders and models are scored, from number `first` on."""
    return list(itertools.islice(problems("test", level, SCORING_FROM), first, first + count))


def _as_words(response: str | Sequence[int]) -> list[str]:
    words = response.split() if isinstance(response, str) else [VOCABULARY[int(index)] for index in response]
    return words[: words.index(lang.EOS)] if lang.EOS in words else words


def grade(problem: Problem, response: str | Sequence[int]) -> bool:
    """Whether the response (text or token ids, without the prompt) ends in `the answer is N` with the right N."""
    words = _as_words(response)
    ends = [at for at in range(len(words) - 3) if words[at : at + 3] == ["the", "answer", "is"]]
    return bool(ends) and words[ends[-1] + 3] == str(problem.answer)


def token_errors(problem: Problem, response: Sequence[int]) -> list[bool]:
    """For each response token id: True if no valid response with the same earlier wording has it at that position.

    A free word is right if it is one of its slot's options, and the matching one where it has to agree with an
    earlier word that was itself an option. Every other word must be the one in the solution. Tokens after the first
    end-of-text are never errors; a position beyond the solution's end is one unless end-of-text came before.
    """
    words = [VOCABULARY[int(index)] for index in response]
    errors: list[bool] = []
    ended = False
    for at, word in enumerate(words):
        errors.append(not ended and word not in _allowed(problem.slots, words, at))
        ended = ended or word == lang.EOS
    return errors


def _allowed(slots: Sequence[Slot], words: Sequence[str], at: int) -> tuple[str, ...]:
    if at >= len(slots):
        return (lang.EOS,)
    slot = slots[at]
    if slot.follows is not None:
        leader = slots[slot.follows].options
        if words[slot.follows] in leader:
            return (slot.options[leader.index(words[slot.follows])],)
    return slot.options
