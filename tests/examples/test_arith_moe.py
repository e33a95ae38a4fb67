# SPDX-License-Identifier: Apache-2.0
"""The shipped model agrees with its generator, its scripts and transformers."""

import itertools
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen3MoeForCausalLM

EXAMPLE = Path(__file__).parents[2] / "examples" / "arith_moe"
sys.path.insert(0, str(EXAMPLE))

import generate  # noqa: E402
import nvfp4  # noqa: E402
import quantize  # noqa: E402
import score  # noqa: E402
import tokenization  # noqa: E402
import train  # noqa: E402
from model import ArithMoE, Config, from_checkpoint, to_checkpoint  # noqa: E402

STEP = re.compile(r"<<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)")
PROBLEMS = score.read_jsonl(EXAMPLE / "problems.jsonl")
FEWSHOT = score.read_jsonl(EXAMPLE / "fewshot.jsonl")
FORMS = ("bf16", "nvfp4", "nvfp4_ct")
SMALL = Config(vocab_size=64, hidden_size=32, moe_intermediate_size=32, head_dim=8)


def take(split: str, seed: int, count: int) -> list[dict[str, str]]:
    return list(itertools.islice(generate.problems(split, seed), count))


def tensors_of(form: str) -> dict[str, torch.Tensor]:
    return load_file(EXAMPLE / form / "model.safetensors")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(EXAMPLE / "bf16" / "tokenizer.json"))


@pytest.fixture(scope="module")
def modelopt() -> dict[str, torch.Tensor]:
    return tensors_of("nvfp4")


def test_generator_is_deterministic_and_seeded() -> None:
    assert take("train", 3, 50) == take("train", 3, 50)
    assert take("train", 3, 50) != take("train", 4, 50)


def test_unknown_split_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="train, test, fewshot"):
        next(generate.problems("dev", 0))


def test_shipped_problems_are_what_the_generator_makes() -> None:
    assert take("test", 0, 500) == PROBLEMS
    assert take("fewshot", 0, 5) == FEWSHOT


def test_splits_are_disjoint() -> None:
    assert len({p["question"] for p in PROBLEMS}) == 500
    assert {generate.split_of(p["question"]) for p in PROBLEMS} == {"test"}
    assert {generate.split_of(p["question"]) for p in FEWSHOT} == {"fewshot"}
    # what training reads goes through the same filter
    trained = take("train", 1000, 3000)
    assert {generate.split_of(p["question"]) for p in trained} == {"train"}


@pytest.mark.parametrize("problem_set", [PROBLEMS, FEWSHOT, take("train", 7, 2000)])
def test_answers_are_arithmetically_right(problem_set: list[dict[str, str]]) -> None:
    operations = {
        "+": lambda a, b: a + b,
        "-": lambda a, b: a - b,
        "*": lambda a, b: a * b,
        "/": lambda a, b: a // b if a % b == 0 else None,
    }
    for problem in problem_set:
        *lines, last = problem["answer"].split("\n")
        assert len(lines) >= 1
        known = {int(n) for n in re.findall(r"\d+", problem["question"])}
        known |= {2, 3, 4, 5, 10}  # written as words: twice, one third
        for line in lines:
            a, op, b, result, shown = STEP.search(line).groups()
            assert operations[op](int(a), int(b)) == int(result) == int(shown)
            assert {int(a), int(b)} <= known, problem
            known.add(int(result))
        assert last == f"#### {result}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Tom has 12 apples.",
        "12*34 = <<12*34=408>>408\n#### 408",
        " \n\n\t x  y",
        "naïve 世界 🙂\x00",
        "{'a': [1.5e-3]}",
        PROBLEMS[0]["answer"],
    ],
)
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_digits_are_tokens_of_their_own(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("x 12345").tokens[-5:] == list("12345")


def test_shipped_tokenizer_is_what_the_script_builds(tokenizer: Tokenizer) -> None:
    assert tokenization.build(Config().vocab_size).to_str() == tokenizer.to_str()


@pytest.mark.parametrize("form", FORMS)
def test_auto_tokenizer_agrees(form: str, tokenizer: Tokenizer) -> None:
    auto = AutoTokenizer.from_pretrained(EXAMPLE / form)
    prompt = tokenization.prompt_of(PROBLEMS[0]["question"], FEWSHOT)
    assert auto(prompt).input_ids == tokenizer.encode(prompt).ids
    assert (auto.eos_token_id, auto.pad_token_id) == (0, 1)
    assert len(auto) == Config().vocab_size


def test_training_rows_are_tokenized_prompts(tokenizer: Tokenizer) -> None:
    tokens, targets = train.RowMaker(tokenizer, rows=1, seed=5)(0)
    problems = take("train", 5, 20)
    text = tokenization.prompt_of(problems[9]["question"], problems[:9])
    joint = tokenizer.encode(text).ids[:700]
    assert tokens[0, :700].tolist() == joint
    trained = targets[0] != tokenization.IGNORE
    same = targets[0, :-1] == tokens[0, 1:]
    # a trained target is the next token, or EOS where an answer ends
    assert (same | (targets[0, :-1] == tokenization.EOS_ID))[trained[:-1]].all()
    first = tokenizer.encode(tokenization.prompt_of(problems[0]["question"])).ids
    assert not trained[: len(first) - 1].any()


def test_learning_rate_warms_up_and_decays() -> None:
    rates = [train.learning_rate(s, 100, 1.0, 10) for s in range(100)]
    assert rates[9] == 1.0
    assert max(rates) == 1.0
    assert 0.01 <= rates[-1] < 0.02


def test_spread_scales_keeps_every_output_bit() -> None:
    torch.manual_seed(0)
    model = ArithMoE(SMALL).bfloat16()
    tokens = torch.randint(0, 64, (2, 9))
    with torch.no_grad():
        before = model(tokens)[0]
        train.spread_scales(model)
        assert torch.equal(model(tokens)[0], before)


def test_model_equals_transformers(tokenizer: Tokenizer) -> None:
    theirs = Qwen3MoeForCausalLM.from_pretrained(EXAMPLE / "bf16", dtype=torch.float32)
    ours = score.load(EXAMPLE / "bf16", "cpu").float()
    prompt = tokenization.prompt_of(PROBLEMS[1]["question"], FEWSHOT[:1])
    tokens = torch.tensor([tokenizer.encode(prompt).ids])
    with torch.no_grad():
        got, expected = ours(tokens)[0], theirs(tokens).logits
    # FP32 on both sides; experts are summed in another order, logits reach about 30
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_cached_decoding_equals_one_pass() -> None:
    torch.manual_seed(0)
    model = ArithMoE(SMALL)
    tokens = torch.randint(0, 64, (2, 6))
    cache = [torch.zeros(2, 2, 8, 2, 8) for _ in range(SMALL.num_hidden_layers)]
    with torch.no_grad():
        whole = model(tokens)[0]
        parts = [model(tokens[:, :4], cache, torch.arange(4).expand(2, -1))[0]]
        for i in (4, 5):
            parts.append(model(tokens[:, i : i + 1], cache, torch.full((2, 1), i))[0])
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_checkpoint_names_round_trip() -> None:
    tensors = to_checkpoint(ArithMoE(SMALL))
    again = to_checkpoint(from_checkpoint(SMALL, tensors))
    assert tensors.keys() == again.keys()
    assert all(torch.equal(tensors[n], again[n]) for n in tensors)


def test_all_sixteen_codes_round_trip() -> None:
    packed = torch.arange(256, dtype=torch.uint8)
    values = nvfp4.unpack(packed)
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    expected = magnitudes + [-m for m in magnitudes]
    # byte 0xHL holds the even k in L and the odd k in H
    assert values[:32:2].tolist() == expected
    assert values[1::32].tolist() == expected
    assert torch.equal(nvfp4.pack(values), packed)
    assert torch.equal(nvfp4.round_e2m1(values), values)


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        *((0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0)),
        *((5.0, 4.0), (5.01, 6.0), (7.0, 6.0), (0.26, 0.5), (2.51, 3.0)),
    ],
)
def test_ties_go_to_the_even_code(x: float, expected: float) -> None:
    rounded = nvfp4.round_e2m1(torch.tensor([x, -x]))
    assert rounded.tolist() == [expected, -expected]


def test_quantize_is_exact_on_its_own_values() -> None:
    values = nvfp4.unpack(torch.arange(256, dtype=torch.uint8)).view(16, 32)
    values[:, ::16] = 6.0  # every block reaches the largest code
    scale = torch.tensor(1 / 448)
    got, block_scale = nvfp4.quantize(values * 448 * scale, scale)
    assert torch.equal(got, values)
    assert (block_scale == 448).all()


def test_zero_block_keeps_the_smallest_scale() -> None:
    values, block_scale = nvfp4.quantize(torch.zeros(16), torch.tensor(1.0))
    assert block_scale.item() == 2.0**-9
    assert not values.any()


def test_unreached_expert_is_refused() -> None:
    model = ArithMoE(SMALL)
    with pytest.raises(ValueError, match="raise --rows"):
        quantize.calibrate(model, [[5]])


def test_names_are_complete() -> None:
    bf16, modelopt, ct = (set(tensors_of(form)) for form in FORMS)
    kinds = {
        "weight": "weight_packed",
        "weight_scale": "weight_scale",
        "weight_scale_2": "weight_global_scale",
        "input_scale": "input_global_scale",
    }
    experts = {n.removesuffix(".weight") for n in bf16 if ".experts." in n}
    dense = {n for n in bf16 if ".experts." not in n}
    assert len(experts) == 3 * 8 * 3
    assert modelopt == dense | {f"{m}.{k}" for m in experts for k in kinds}
    assert ct == dense | {f"{m}.{k}" for m in experts for k in kinds.values()}


def test_both_nvfp4_forms_hold_the_same_bytes(modelopt: dict) -> None:
    expected = quantize.to_compressed_tensors(modelopt)
    ct = tensors_of("nvfp4_ct")
    assert ct.keys() == expected.keys()
    for name, value in expected.items():
        assert ct[name].dtype == value.dtype
        assert torch.equal(ct[name].view(torch.uint8), value.view(torch.uint8)), name
    one = "model.layers.1.mlp.experts.5.up_proj"
    scale = modelopt[f"{one}.weight_scale_2"]
    assert ct[f"{one}.weight_global_scale"].tolist() == [1 / scale]


def test_shipped_weights_are_the_quantized_bf16(modelopt: dict) -> None:
    bf16 = tensors_of("bf16")
    amax = {
        n.removesuffix(".weight"): torch.tensor(1.0) for n in bf16 if ".experts." in n
    }
    for name, value in quantize.to_modelopt(bf16, amax).items():
        if not name.endswith("input_scale"):
            same = value.contiguous().view(-1).view(torch.uint8)
            assert torch.equal(modelopt[name].view(-1).view(torch.uint8), same), name


def test_scales_are_finite_positive_and_of_the_right_type(modelopt: dict) -> None:
    for name, value in modelopt.items():
        if name.endswith(("weight_scale_2", "input_scale")):
            assert value.dtype == torch.float32
            assert value.shape == ()
            assert 0 < value.item() < 1
        elif name.endswith("weight_scale"):
            assert value.dtype == torch.float8_e4m3fn
            assert value.float().isfinite().all()
            assert (value.float() > 0).all()


def test_gate_and_up_have_clearly_different_scales(modelopt: dict) -> None:
    for name, up in modelopt.items():
        if name.endswith("up_proj.weight_scale_2"):
            gate = modelopt[name.replace("up_proj", "gate_proj")]
            assert not 0.8 < (up / gate).item() < 1.25, name


def test_quantization_configs_name_what_stays_bf16() -> None:
    for form in FORMS[1:]:
        content = json.loads((EXAMPLE / form / "config.json").read_text())
        config = Config.from_hf(content)
        assert config == Config()
        build = {
            "nvfp4": quantize.modelopt_config,
            "nvfp4_ct": quantize.compressed_tensors_config,
        }[form]
        assert content["quantization_config"] == json.loads(json.dumps(build(config)))
    legacy = json.loads((EXAMPLE / "nvfp4" / "hf_quant_config.json").read_text())
    assert legacy["quantization"]["quant_algo"] == "NVFP4"


@pytest.mark.parametrize("form", ["bf16", "nvfp4"])
def test_shipped_model_solves_problems(form: str, tokenizer: Tokenizer) -> None:
    model = score.load(EXAMPLE / form, "cpu")
    short = sorted(PROBLEMS, key=lambda p: len(p["answer"]))[:6]
    texts = score.answer(model, tokenizer, short, [], batch=6)
    # greedy text ends by itself (EOS), so it is the answer and nothing more
    assert texts == [f" {p['answer']}" for p in short]


def test_compressed_tensors_folder_is_not_scored_by_mistake() -> None:
    with pytest.raises(ValueError, match="score the BF16 or ModelOpt folder"):
        score.load(EXAMPLE / "nvfp4_ct", "cpu")


def test_fits_in_the_repository() -> None:
    sizes = [f.stat().st_size for f in EXAMPLE.rglob("*") if f.is_file()]
    assert sum(sizes) < 25 * 1000 * 1000
