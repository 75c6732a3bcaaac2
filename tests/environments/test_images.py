"""Environments and agents that show images: evaluations take them, trainings refuse them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import lookers
import orjson
import pytest
import tiny
import tiny_vision
import torch
from gateways import Gateway
from grpo_jobs import rows as rows_file
from lookers import TURNS, picture, screen
from tiny_vision import IMAGE
from transformers import AutoImageProcessor

from warmd.jobs.context import WarmModel
from warmd.jobs.engine import images
from warmd.jobs.engine.image_tokens import insert_image_tokens
from warmd.jobs.errors import JobFailed
from warmd.jobs.eval.kind import run as evaluate
from warmd.jobs.eval.options import EvalSpec
from warmd.jobs.grpo.kind import run as train
from warmd.jobs.grpo.options import GrpoSpec
from warmd.jobs.infer.kind import run as infer
from warmd.jobs.infer.options import InferSpec

pytestmark = pytest.mark.usefixtures("like_a_work_horse")

SUPPORT = str(Path(lookers.__file__).parent)
LENGTH = 40


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """The folder of a model that takes images, the model and its tokenizer."""
    folder = tmp_path_factory.mktemp("seeing")
    model, tokenizer = tiny_vision.save(folder)
    model.generation_config.eos_token_id = [*range(2, 43)]  # half of all tokens: turns are short
    tokenizer.chat_template = tiny_vision.CHAT_TEMPLATE
    return folder, model, tokenizer


def surroundings(gateway: Gateway, seeing: Any, name: str) -> tiny.Surroundings:
    path, model, tokenizer = seeing
    made = tiny.surroundings(gateway.home.runs / name, model)
    models = cast(tiny.Models, made.ctx.models)
    models.tokenizer, models.path = tokenizer, path
    made.ctx = replace(made.ctx, code_folders=(SUPPORT,), job_id=f"eval-{name}")
    return made


@pytest.fixture
def made(gateway: Gateway, seeing: Any, request: Any) -> tiny.Surroundings:
    return surroundings(gateway, seeing, f"{abs(hash(request.node.name)):x}")


def evaluated(made: tiny.Surroundings, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """The completions of an evaluation, by task, and its result."""
    small = {"samples": 3, "max_turn_length": LENGTH, "environment_attempts": 1}
    result = evaluate(EvalSpec.parse(small | options).located(Path.cwd()), made.ctx)
    lines = (made.ctx.run_dir / "rows.jsonl").read_bytes().splitlines()
    return [orjson.loads(line)["completions"] for line in lines], result


def texts_of(completion: dict[str, Any]) -> list[str]:
    texts: list[str] = completion["messages"][1::2]
    return texts


def answered(made: tiny.Surroundings, messages: list[Any]) -> str:
    """What the infer kind answers to a chat with images."""
    options = {"model": "demo", "messages": json.dumps(messages), "temperature": 0}
    found = infer(InferSpec.parse({**options, "max_tokens": LENGTH}), made.ctx)
    text: str = found["choices"][0]["text"]
    return text


def generated(seeing: Any, prompt: list[int], seed: int) -> list[int]:
    """The tokens that transformers generates after a prompt with the first screens of a task."""
    path, model, _ = seeing
    processor = AutoImageProcessor.from_pretrained(path, backend="pil")
    ids = torch.tensor([prompt])
    num_screens = int((ids[0, 1:] == IMAGE).logical_and(ids[0, :-1] != IMAGE).sum())
    urls = [picture(seed, turn)["image_url"]["url"] for turn in range(num_screens)]
    shown = [images.read(url, images.Budget())[0] for url in urls]
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=(ids == IMAGE).long(),
        do_sample=False,
        max_new_tokens=LENGTH,
        **processor(images=shown, return_tensors="pt"),
    )
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens


def test_each_turn_is_what_transformers_generates_after_all_screens_so_far(made, seeing, tmp_path):
    dataset = rows_file(tmp_path / "tasks.jsonl", *[{"folder": str(tmp_path)}] * 4)
    evaluated(made, agent="lookers:records", dataset=dataset, samples=4)
    compared = 0  # turns after the first, with several screens
    for file in tmp_path.glob("*.json"):
        for number, turn in enumerate(json.loads(file.read_text())):
            if IMAGE in turn["written"]:  # to transformers an image that is missing
                break
            assert turn["written"] == generated(seeing, turn["prompt"], int(file.stem))
            compared += number > 0
    assert compared >= 4


def test_an_environment_shows_what_an_agent_shows(gateway, seeing, made):
    rows, _ = evaluated(made, agent="lookers:looks")
    others = surroundings(gateway, seeing, "same")
    same, _ = evaluated(others, environment="lookers:Screens")
    assert any(len(texts_of(completion)) == TURNS for (completion,) in rows)
    for (one,), (other,) in zip(rows, same, strict=True):
        assert one["messages"] == other["messages"]


def test_people_see_the_size_of_an_image_in_its_place(made):
    rows, _ = evaluated(made, environment="lookers:PartsOnly", samples=1)
    ((completion,),) = rows
    assert completion["messages"][0] == [{"role": "user", "content": "[image 56x56]0?"}]
    assert completion["messages"][2] == [{"role": "user", "content": "[image 84x56]1?"}]
    assert "base64" not in (made.ctx.run_dir / "rows.jsonl").read_text()


def test_an_agent_that_keeps_one_screen_has_a_context_of_each(made):
    rows, result = evaluated(made, agent="lookers:forgets")
    for seed, (completion,) in enumerate(rows):
        shown = [one for one in completion["messages"] if isinstance(one, list)]
        assert len(shown) == TURNS
        texts = [one for one in completion["messages"] if isinstance(one, str)]
        # Contexts after the first are in an order that does not depend on time.
        wanted = [answered(made, [screen(seed, turn)]) for turn in range(TURNS)]
        assert (texts[0], sorted(texts)) == (wanted[0], sorted(wanted))
    assert result["metrics"]["turns"]["value"] == TURNS


def test_turns_of_an_evaluation_can_be_forced_to_be_clicks_and_are_read(gateway, tmp_path):
    made = surroundings(gateway, (tmp_path, *tiny_vision.save_chatting(tmp_path)), "clicks")
    _, result = evaluated(made, agent="lookers:clicks", samples=2, max_turn_length=80)
    metrics = result["metrics"]
    assert (metrics["forced"]["value"], metrics["read"]["value"]) == (1, 1)


def test_forced_turns_continue_one_conversation(gateway, tmp_path):
    model, tokenizer = tiny_vision.save_chatting(tmp_path)
    made = surroundings(gateway, (tmp_path, model, tokenizer), "choices")
    rows, _ = evaluated(made, agent="lookers:answers_by_choice", samples=3)
    for (completion,) in rows:
        texts = texts_of(completion)
        assert (len(texts), set(texts) <= {"yes", "no"}) == (4, True)
        contents = [one["content"] for shown in completion["messages"][::2] for one in shown]
        assert contents == ["yes?", "[image 56x56]0?", "[image 84x56]1?", "[image 56x56]2?"]


def test_a_form_that_cannot_be_had_is_refused_to_its_request_alone(gateway, tmp_path):
    model, tokenizer = tiny_vision.save_chatting(tmp_path)
    made = surroundings(gateway, (tmp_path, model, tokenizer), "badly")
    tasks = [{"form": form} for form in ("", *lookers.BAD_FORMS)]
    dataset = rows_file(tmp_path / "tasks.jsonl", *tasks)
    rows, result = evaluated(
        made,
        agent="lookers:asks_badly",
        dataset=dataset,
        samples=len(tasks),
        max_turn_length=150,
        temperature=1.5,
    )
    assert [completion.get("error") for (completion,) in rows] == [None] * len(tasks)
    assert result["metrics"]["reward"]["value"] == 1


def test_a_constrained_turn_that_its_agent_leaves_behind_disturbs_nobody(gateway, tmp_path):
    model, tokenizer = tiny_vision.save_chatting(tmp_path)
    made = surroundings(gateway, (tmp_path, model, tokenizer), "left")
    rows, _ = evaluated(made, agent="lookers:leaves", samples=6, max_turn_length=150)
    assert [completion["finish_reason"] for (completion,) in rows] == ["returned"] * 6


def test_text_and_images_alternate_in_a_conversation(made):
    rows, _ = evaluated(made, environment="lookers:Alternating", samples=4)
    shown = [completion["messages"][::2] for (completion,) in rows]
    image = [{"role": "user", "content": "[image 84x56]1?"}]
    assert ["begin", image, "go on"] in shown


def test_an_image_that_cannot_be_read_fails_its_episode_only(made):
    rows, result = evaluated(made, environment="lookers:SometimesBroken", samples=6)
    assert [bool(completion.get("error")) for (completion,) in rows] == [
        seed % 3 == 0 for seed in range(6)
    ]
    assert "image: the image cannot be read" in rows[0][0]["error"]
    assert result["metrics"]["reward"]["n"] == 4


def test_an_image_by_the_address_of_a_file_is_refused(made):
    with pytest.raises(JobFailed, match="url begins with data:image/, got 'file:///etc/passwd'"):
        evaluated(made, environment="lookers:ByFile", samples=10)


def test_a_model_without_a_vision_encoder_is_refused_by_name(gateway, seeing, request):
    path, _, tokenizer = seeing
    made = surroundings(gateway, (path, tiny.chatting()[0], tokenizer), "text")
    with pytest.raises(JobFailed, match="messages: images must go with a model of type qwen2_vl"):
        evaluated(made, environment="lookers:Screens")


def test_a_training_refuses_images_by_name(gateway, seeing):
    path, _, tokenizer = seeing
    small = {"samples": 4, "prompts_per_step": 2, "num_generations": 2, "max_turn_length": 8}
    made = surroundings(gateway, (path, tiny.chatting()[0], tokenizer), "trained")
    job = GrpoSpec.parse({**small, "environment": "lookers:Screens"})
    with pytest.raises(JobFailed, match="environment: must show text to a policy that is trained"):
        train(job, made.ctx)
    made = surroundings(gateway, (path, tiny.chatting()[0], tokenizer), "refused")
    train(GrpoSpec.parse({**small, "agent": "lookers:reads_refusal"}), made.ctx)
    steps = made.of_type("step")
    assert [one["reward"] for one in steps] == [1.0, 1.0]


def test_the_patches_of_an_image_can_be_made_again(seeing):
    path, model, tokenizer = seeing
    warm = WarmModel(name="demo", path=path, model=model, tokenizer=tokenizer, unembedded=())
    url = picture(1, 0)["image_url"]["url"]
    _, (image,) = insert_image_tokens(warm, [IMAGE], [url], images.Budget())
    first = image.patches().clone()
    image.patches.release()
    assert image.patches().equal(first)
