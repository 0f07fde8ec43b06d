"""Distillation: which tokens each mode trains, what a teacher must be able to do, and what happens when it cannot."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError
from verifiers.v1.episode import WireEpisode
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import Branch, ModelCall
from verifiers.v1.types import (
    AssistantMessage,
    ImageUrlContentPart,
    ImageUrlSource,
    SystemMessage,
    UserMessage,
)

from primerl_hpc.common.errors import ConfigError, DataError
from primerl_hpc.envs.tasks import EnvironmentTask
from primerl_hpc.orchestrator.algorithms import make_algorithm
from primerl_hpc.orchestrator.batches.packing import pack
from primerl_hpc.orchestrator.driver import RolloutDriver
from primerl_hpc.orchestrator.rollout_data import Outcome, Rollout, RolloutFailed, Sample, Split, Start
from primerl_hpc.orchestrator.rollouts.distillation import Distillation
from primerl_hpc.orchestrator.rollouts.environments import EnvHandle
from primerl_hpc.orchestrator.rollouts.runner import RolloutRunner
from primerl_hpc.orchestrator.rollouts.self_teacher import check_demonstrations, demonstrated_prompt
from primerl_hpc.orchestrator.rollouts.teacher import TeacherClient, add_samples
from primerl_hpc.recipe.chatml import ChatMLRenderer
from primerl_hpc.recipe.load import parse_recipe
from primerl_hpc.recipe.schema.algorithm import OPSD, Algorithm
from primerl_hpc.recipe.schema.recipe import Recipe, Teacher
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.endpoints import publish_endpoint
from primerl_hpc.run.rundir import RunDir
from tests.support.api import Request, serve
from tests.support.helpers import MINIMAL_RL
from tests.support.train_loop import RecordedEnvironment
from tests.unit.orchestrator.test_trajectories import episode, prompt, reply, trace


def sample(ref: float | None = None) -> Sample:
    mask = np.arange(6) >= 3
    logprobs = np.where(mask, np.float32(-0.5), np.float32(0))
    refs = None if ref is None else np.where(mask, np.float32(ref), np.float32(0))
    return Sample(np.arange(6), mask, logprobs, 1.0, ref_logprobs=refs)


def rollout(*samples: Sample, reward: float = 1.0) -> Rollout:
    return Rollout(reward, list(samples), 3, 3, 1, False)


def algorithm(kind: str):
    return make_algorithm(TypeAdapter(Algorithm).validate_python({"type": kind}))


def row_of(kind: str, given: Sample):
    made = algorithm(kind)
    (advantages,) = made.advantages([rollout(given)])
    assert not advantages.any()
    train_sample = made.train_sample(given, 0.0, 0)
    assert train_sample.has_signal
    return pack([train_sample], seq_len=8, num_ranks=1).ranks[0][0]


def test_opd_trains_the_sampled_tokens_towards_the_teacher_and_nothing_by_rl():
    row = row_of("opd", sample(ref=-0.2))
    assert row.weights("ref_kl").tolist() == [0, 0, 0, 1, 1, 1]
    assert row.ref_logprobs.tolist() == pytest.approx([0, 0, 0, -0.2, -0.2, -0.2])
    assert not row.weights("rl").any() and row.ce_weights is None
    assert row.loss_mask.tolist() == [False] * 3 + [True] * 3


def test_opsd_trains_like_opd():
    assert type(algorithm("opsd")) is type(algorithm("opd"))


def test_opd_without_reference_logprobs_is_an_internal_error():
    with pytest.raises(ValueError, match="teacher"):
        algorithm("opd").train_sample(sample(), 0.0, 0)


def test_sft_distill_trains_the_teachers_tokens_by_cross_entropy_alone():
    row = row_of("sft_distill", sample())
    assert row.ce_weights.tolist() == [0, 0, 0, 1, 1, 1]
    assert not row.weights("rl").any() and not row.weights("ref_kl").any()
    assert not row.loss_mask.any() and not row.inference_logprobs.any()  # the policy sampled nothing


def recipe(**more) -> Recipe:
    return parse_recipe({**MINIMAL_RL, "environments": {"train": [{"id": "a"}]}, **more})


def test_a_teacher_and_its_algorithm_come_together():
    teacher = {"base_url": "http://h:8000/v1", "model": {"name": "t"}}
    assert recipe(algorithm={"type": "opd"}, teacher=teacher).teacher.model.name == "t"
    with pytest.raises(ValueError, match="needs a teacher"):
        recipe(environments={"train": [{"id": "a", "algorithm": {"type": "sft_distill"}}]})
    with pytest.raises(ValueError, match="no algorithm uses it"):
        recipe(teacher=teacher)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"base_url": "h:8000"}, "pattern"),
        ({"key_variable": "KEY"}, "belongs to a base_url"),
        ({"base_url": "http://h/v1", "layout": {"replicas": 2}}, "there is a base_url"),
        ({"base_url": "http://h/v1", "inference": {"kv_cache_gib": 1}}, "there is a base_url"),
    ],
)
def test_a_teacher_is_served_by_the_run_or_by_an_external_server(more, says):
    with pytest.raises(ValidationError, match=says):
        recipe(algorithm={"type": "opd"}, teacher={"model": {"name": "t"}, **more})


@pytest.mark.parametrize(
    "settings",
    [{"algorithm": {"type": "opd"}, "teacher": {"model": {"name": "t"}}}, {"algorithm": {"type": "opsd"}}],
)
def test_tokens_are_sampled_at_the_temperature_at_which_they_are_scored(settings):
    recipe(**settings)
    with pytest.raises(ValueError, match="temperature 1"):
        recipe(**settings, rollouts={"sampling": {"temperature": 0.7}})


def test_a_task_without_a_demonstration_and_a_template_without_its_place_are_refused():
    config = OPSD(demo_key="answer")
    good, bad = (
        EnvironmentTask(key, {"prompt": key, **more}) for key, more in (("a", {"answer": "A"}), ("b", {}))
    )
    check_demonstrations(config, "maths", [good])
    with pytest.raises(DataError, match=r"environment maths: task 'b' has no 'answer'.*one of: prompt"):
        check_demonstrations(config, "maths", [good, bad])
    with pytest.raises(ValidationError, match="pattern"):
        OPSD(template="look here")


class Words:
    """A renderer whose tokens are the words of messages."""

    def render_ids(self, messages: list[dict], *, tools: object, add_generation_prompt: bool) -> list[str]:
        assert tools is None and add_generation_prompt
        return [word for each in messages for word in (each["role"], *each["content"].split())] + ["reply:"]


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        (None, ["system", "DEMO", "user", "hi", "reply:"]),
        ("be kind", ["system", "DEMO", "be", "kind", "user", "hi", "reply:"]),
    ],
)
def test_a_demonstration_stands_at_the_beginning_of_the_system_message(system, expected):
    prompt = [SystemMessage(content=system)] if system else []
    nodes = [
        *(
            MessageNode(message=message, token_ids=[1], mask=[False])
            for message in [*prompt, UserMessage(content="hi")]
        ),
        MessageNode(
            message=AssistantMessage(content="oh"), token_ids=[2, 3], mask=[False, True], sampled=True
        ),
        MessageNode(message=UserMessage(content="and?"), token_ids=[4], mask=[False]),
    ]
    assert demonstrated_prompt(Words(), Branch(index=0, nodes=nodes), "DEMO") == expected


class Tokenizer:
    """One token per character, from ``first`` on."""

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [self.first + ord(letter) for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(token - self.first) for token in tokens)

    def get_added_vocab(self) -> dict[str, int]:
        return {"<|end|>": 0}


class Letters(Tokenizer):
    """ChatML's two special tokens too."""

    eos_token_id = 2

    def convert_tokens_to_ids(self, token: str) -> int:
        return {"<|im_start|>": 1, "<|im_end|>": 2}[token]

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return super().encode(text, add_special_tokens)


@pytest.mark.parametrize(
    ("reasons", "trained"),
    [
        (("stop", "stop"), "answer\2answer\2"),
        (("stop", "length"), "answer\2answer"),
        (("length", "stop"), "answeranswer\2"),
    ],
)
def test_a_reply_that_was_cut_off_teaches_no_end(reasons, trained):
    nodes = [prompt([]), reply([], 0, scaffold=0), prompt([], 1), reply([], 2, scaffold=0)]
    played = trace(nodes)
    played.calls = [
        ModelCall(node=node, finish_reason=reason) for node, reason in zip((1, 3), reasons, strict=True)
    ]
    given = rollout()
    add_samples(given, episode(played), ChatMLRenderer(Letters()))
    (made,) = given.samples
    assert "".join(map(chr, made.token_ids[made.loss_mask])) == trained


async def outcome_of(run: RunDir, made: Recipe, played: WireEpisode) -> Outcome:
    tasks = [EnvironmentTask("t", {"prompt": "look"})]
    handle = EnvHandle(made.environments.train[0], RecordedEnvironment(played), tasks)
    distillation = Distillation(run, made)
    runner = RolloutRunner(
        made,
        {Split.TRAIN: [handle]},
        live_version=lambda: 0,
        router_url=lambda: "http://h",
        distillation=distillation,
    )
    runner.start(Start(0, 0, Split.TRAIN, 0, 0, 0))
    try:
        return await runner.outcomes.get()
    finally:
        await runner.close()
        await distillation.close()


@pytest.mark.parametrize("kind", ["opd", "opsd", "sft_distill"])
def test_images_end_a_run_that_would_train_on_their_placeholders(tmp_path, kind):
    teacher = {} if kind == "opsd" else {"teacher": {"base_url": "http://h/v1", "model": {"name": "t"}}}
    made = recipe(algorithm={"type": kind}, **teacher)
    shown = prompt([1, 2])
    source = ImageUrlSource(url="data:image/png;base64,AA==")
    shown.message = UserMessage(content=[ImageUrlContentPart(image_url=source)])
    played = episode(trace([shown, reply([9, 4], 0)]))
    outcome = asyncio.run(outcome_of(RunDir(tmp_path), made, played))
    driver = RolloutDriver(RunDir(tmp_path), made, None, None, None, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"environment a: its rollouts show images, but algorithm {kind}"):
        driver._group_of(outcome)


@pytest.mark.parametrize(
    ("sampling", "is_trained", "refused"),
    [
        ({"temperature": 1.0, "top_p": 0.8}, True, "top_p"),  # as a package may declare it
        ({"temperature": 0.5}, True, "temperature"),
        ({"temperature": None}, True, None),  # an engine's default is 1
        ({"temperature": 0.0, "top_k": 1}, False, None),
        ({"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 4}, True, None),
    ],
)
def test_a_trained_agent_that_samples_otherwise_than_the_trainer_computes_ends_the_run(
    tmp_path, sampling, is_trained, refused
):
    config = {"harness": {"id": "inproc-chat"}, "runtime": {"type": "subprocess"}, "sampling": sampling}
    player = {"config": config, "name": "solver", "trainable": is_trained}
    other = trace([prompt([1, 2]), reply([9, 4], 0)])
    played = episode(other, trace([prompt([1, 2]), reply([9, 4], 0)], agent=player))
    outcome = asyncio.run(outcome_of(RunDir(tmp_path), recipe(), played))
    if refused is None:
        assert outcome.rollout is not None
    else:
        assert isinstance(outcome.fatal, ConfigError)
        assert f"environment a: its agent solver sets its own {refused}" in str(outcome.fatal)


# -- a teacher with scripted answers
# ---------------------------------------------------------------------------------


class Server:
    """An OpenAI-compatible server; a test changes what it answers."""

    def __init__(self) -> None:
        self.status, self.context, self.tokenizer = 200, 9, Tokenizer()
        self.completions = with_logprobs
        self.seen: list[dict] = []
        self.url = ""

    def answer(self, path: str, body: dict) -> dict:
        match path:
            case "/v1/models":
                return {"data": [{"id": "t", "max_model_len": self.context}]}
            case "/tokenize":
                return {"tokens": self.tokenizer.encode(body["prompt"], body["add_special_tokens"])}
            case "/v1/chat/completions":
                return {"choices": [{"message": {"content": "h"}}]}
            case "/v1/completions":
                return self.completions(body)
        raise AssertionError(path)


@pytest.fixture
def server() -> Iterator[Server]:
    served = Server()

    def answer(request: Request) -> tuple[int, dict]:
        served.seen.append({"path": request.path, "key": request.headers["authorization"], **request.body})
        return served.status, served.answer(request.path, request.body)

    with serve(answer) as url:
        served.url = f"{url}/v1"
        yield served


def with_logprobs(body: dict) -> dict:
    entries = [None, *({str(token): {"logprob": -0.1 * token}} for token in body["prompt"][1:])]
    return {"choices": [{"prompt_logprobs": entries}]}


def with_teacher(run: Path, use: Callable[[TeacherClient], Awaitable[None]], **settings) -> None:
    async def main() -> None:
        teacher = TeacherClient(RunDir(run), Teacher.model_validate({"model": {"name": "t"}, **settings}))
        teacher.refresh()
        try:
            await use(teacher)
        finally:
            await teacher.close()

    asyncio.run(main())


def check(url: str, algorithm: str = "opd", **settings) -> None:
    with_teacher(
        Path("/nowhere"),
        lambda teacher: teacher.check({algorithm}, seq_len=8, tokenizer=Tokenizer()),
        base_url=url,
        **settings,
    )


def score(url: str, given: Rollout, seq_len: int = 8, **settings) -> None:
    def ask(teacher: TeacherClient) -> Awaitable[None]:
        return teacher.add_logprobs(given, seq_len=seq_len)

    with_teacher(Path("/nowhere"), ask, base_url=url, **settings)


def test_tokens_beyond_the_length_of_a_row_are_not_scored(server):
    given = rollout(sample())
    score(server.url, given, seq_len=5)
    assert [request["prompt"] for request in server.seen] == [list(range(5))]
    assert given.samples[0].ref_logprobs.tolist() == pytest.approx([0, 0, 0, -0.3, -0.4, 0])


def test_every_sampled_token_gets_the_teachers_logprob(server, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "secret")
    given = rollout(sample(), sample())
    score(server.url, given, key_variable="TEACHER_KEY")
    assert [request["prompt"] for request in server.seen] == [list(range(6))] * 2
    assert {request["key"] for request in server.seen} == {"Bearer secret"}
    for each in given.samples:
        assert each.ref_logprobs.tolist() == pytest.approx([0, 0, 0, -0.3, -0.4, -0.5])


@pytest.mark.parametrize("algorithm", ["opd", "sft_distill"])
def test_a_valid_teacher_passes_and_gets_only_the_needed_requests(server, algorithm):
    check(server.url, algorithm)
    asked = [request["path"] for request in server.seen]
    assert (
        asked
        == {"opd": ["/v1/models", "/tokenize", "/v1/completions"], "sft_distill": ["/v1/chat/completions"]}[
            algorithm
        ]
    )


@pytest.mark.parametrize(
    "answer",
    [
        lambda body: {},
        lambda body: {"choices": [{"prompt_logprobs": None}]},
        lambda body: {"choices": [{"prompt_logprobs": [None]}]},
        lambda body: {
            "choices": [{"prompt_logprobs": [None, *({"999": {"logprob": -1}} for _ in body["prompt"][1:])]}]
        },
    ],
)
def test_a_teacher_without_prompt_logprobs_is_refused_before_the_first_rollout(server, answer):
    server.completions = answer
    with pytest.raises(ConfigError, match=r"teacher: .* log-probabilit.*needs vLLM"):
        check(server.url)
    with pytest.raises(RolloutFailed) as caught:
        score(server.url, rollout(sample()))
    assert not caught.value.is_engine_fault


def test_a_teacher_with_another_tokenizer_is_refused_with_the_token(server):
    server.tokenizer = Tokenizer(first=3)
    with pytest.raises(
        ConfigError,
        match="tokenizer differs from the policy's: '0' is token 48 for the policy and 51 for the teacher",
    ):
        check(server.url)
    check(server.url, "sft_distill")  # text goes from one to the other


def test_a_teacher_whose_context_is_too_short_is_refused(server):
    server.context = 8
    with pytest.raises(
        ConfigError, match="context of 8 tokens is too small: it must score 8 tokens and sample one more"
    ):
        check(server.url)


@pytest.mark.parametrize(("status", "is_fault"), [(503, True), (400, False)])
def test_an_unreachable_teacher_is_distinguished_from_one_that_refuses(server, status, is_fault):
    server.status = status
    with pytest.raises(RolloutFailed, match=str(status)) as caught:
        score(server.url, rollout(sample()))
    assert caught.value.is_engine_fault is is_fault


@pytest.mark.parametrize("algorithm", ["opd", "sft_distill"])
def test_a_refused_key_and_an_address_without_a_server_are_reported_at_the_start(server, algorithm):
    server.status = 401
    with pytest.raises(ConfigError, match=r"cannot be used: .*401.*key_variable"):
        check(server.url, algorithm)
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:9/v1 cannot be used"):
        check("http://127.0.0.1:9/v1", algorithm)


def test_a_key_that_is_missing_is_named(monkeypatch):
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"TEACHER_KEY, .*, is not set"):
        check("http://h/v1", key_variable="TEACHER_KEY")


def test_engines_of_the_runs_own_are_asked_in_turn_with_the_runs_key(server, tmp_path):
    run = RunDir(tmp_path)
    run.endpoints.mkdir(parents=True)

    async def use(teacher: TeacherClient) -> None:
        with pytest.raises(RolloutFailed, match="down") as caught:
            await teacher.add_logprobs(rollout(sample()), seq_len=8)
        assert caught.value.is_engine_fault
        for name in ("teacher-0", "teacher-1", "inference-0"):
            publish_endpoint(run, name, f"{server.url.removesuffix('/v1')}?{name}", model="t")
        assert [url[-12:] for url in teacher.refresh()] == ["teacher-0/v1", "teacher-1/v1"]
        assert [teacher.next_url()[-12:-3] for _ in range(3)] == ["teacher-0", "teacher-1", "teacher-0"]
        publish_endpoint(run, "teacher-0", server.url.removesuffix("/v1"), model="t")
        run.endpoint("teacher-1").unlink()
        teacher.refresh()
        await teacher.add_logprobs(rollout(sample()), seq_len=8)

    with_teacher(tmp_path, use)
    assert server.seen[-1]["key"] == f"Bearer {run_keys(run).api_key}"
