"""python -m bench.families: minute models of the families of Transformers, converted, and what of their bits varies.

Each family is made with random weights, two layers of width 32, in float32 and bfloat16, converted, with pydet's
attention, and runs under override_aten(). A cell is the number of elements that differ, in float32 and in bfloat16:

- alone: logits of three sequences, one of them padded, in a batch and each alone (`pydet.torch.check`).
- decode: logits of tokens that came one by one, with a cache, and in one prefill.
- odd: as alone, at widths that are no multiples of 8, alone on 1 and in the batch on 2 threads of PyTorch.
- training: gradients of all parameters, of a batch and of its sequences one by one (`accumulate_gradients`).

A cell may say "refused" (by a sentence of pydet's) or "-" (the model does not run so, converted or not). The last
columns are how far logits are from stock's, and what the model's modules leave to PyTorch.

    python -m bench.families                     # all, into docs/families.md
    python -m bench.families llama mamba2        # those, to the screen
"""

import argparse
import inspect
import pathlib
import sys
import time
import warnings

import torch
import transformers

import pydet
import pydet.torch

FAMILIES = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "olmo",
    "olmo2",
    "olmo3",
    "phi",
    "phi3",
    "gpt2",
    "gpt_neox",
    "gpt_bigcode",
    "opt",
    "bloom",
    "stablelm",
    "starcoder2",
    "granite",
    "glm",
    "glm4",
    "cohere",
    "cohere2",
    "nemotron",
    "smollm3",
    "helium",
    "ernie4_5",
    "persimmon",
    "biogpt",
    "codegen",
    "gptj",
    "falcon",
    "mpt",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "granitemoe",
    "gpt_oss",
    "minimax_m2",
    "deepseek_v3",
    "jamba",
    "mamba",
    "mamba2",
    "falcon_h1",
    "bamba",
    "qwen3_next",
    "qwen3_5_text",
    "olmo_hybrid",
    "lfm2",
    "zamba2",
    "nemotron_h",
    "granitemoehybrid",
    "falcon_mamba",
    "apertus",
    "arcee",
    "bitnet",
    "cohere2_moe",
    "ctrl",
    "cwm",
    "deepseek_v2",
    "diffllama",
    "dots1",
    "ernie4_5_moe",
    "exaone4",
    "exaone_moe",
    "flex_olmo",
    "glm4_moe",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "jetmoe",
    "modernbert-decoder",
    "phimoe",
    "seed_oss",
    "deepseek_v32",
    "bert",
    "roberta",
    "doge",
    "t5",
    "mt5",
    "umt5",
    "switch_transformers",
    "bart",
    "mbart",
    "marian",
    "pegasus",
    "whisper",
    "swin",
    "electra",
    "xlm-roberta",
    "data2vec-text",
    "camembert",
    "big_bird",
    "ernie",
    "rembert",
    "megatron-bert",
    "roberta-prelayernorm",
    "blenderbot",
    "blenderbot-small",
    "mvp",
    "plbart",
    "m2m_100",
    "gpt_neox_japanese",
    "hy_v3",
    "iquestcoder",
    "internlm3",
    "jais2",
    "sarvam_moe",
    "hyperclovax",
    "kolibri1",
    "lfm3",
    "lara_mini",
    "flint",
    "beam",
    "openai-gpt",
    "minicpm3",
    "ministral",
    "ministral3",
    "nanochat",
    "granite_swa",
    "granitemoe_swa",
    "granitemoeshared",
    "laguna",
    "gemma4_text",
    "glm4_moe_lite",
    "llama4_text",
    "mimo_v2_flash",
    "mellum",
    "afmoe",
    "exaone",
    "solar_open",
    "vaultgemma",
    "xglm",
]
OF_T5 = ("t5", "mt5", "umt5", "switch_transformers")
OF_BART = (
    "bart",
    "mbart",
    "marian",
    "pegasus",
    "blenderbot",
    "blenderbot-small",
    "mvp",
    "plbart",
    "m2m_100",
    "whisper",
)
OF_BERT = (
    *("bert", "roberta", "electra", "xlm-roberta", "camembert", "data2vec-text", "big_bird", "ernie", "rembert"),
    *("megatron-bert", "roberta-prelayernorm", "roformer"),
)
AUTO = {  # of what is no decoder
    **dict.fromkeys((*OF_T5, *OF_BART), "AutoModelForSeq2SeqLM"),
    **dict.fromkeys(OF_BERT, "AutoModelForMaskedLM"),
    "whisper": "AutoModelForSpeechSeq2Seq",
    "swin": "AutoModelForImageClassification",
}
SIZES = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2},
    **{"pad_token_id": 0},
}
ODD = {"vocab_size": 61, "hidden_size": 36, "intermediate_size": 50, "head_dim": 10}
EXPERTS = {
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1},
    **{"topk_group": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_shared_experts": 1},
    **{"first_k_dense_replace": 1, "decoder_sparse_step": 1},
}
OWN = {  # what else a family wants to be minute
    "falcon": {"head_dim": None},
    "bloom": {"n_head": 4, "n_layer": 2},
    "gptj": {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 8, "n_positions": 512},
    "codegen": {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 8, "n_positions": 512},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "deepseek_v3": {
        **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
        **{"num_key_value_heads": 4, "head_dim": None},
    },
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "state_size": 16, "n_groups": 1, "chunk_size": 8},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_chunk_size": 8},
    "bamba": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 16,
        "mamba_chunk_size": 8,
        "attn_layer_indices": [1],
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "use_mamba_kernels": False},
    "zamba2": {
        **{"layers_block_type": ["linear_attention", "hybrid"], "n_mamba_heads": 8, "mamba_d_state": 16},
        **{"chunk_size": 8, "num_key_value_heads": 4, "head_dim": None},
    },
    "nemotron_h": {
        **{"layers_block_type": ["linear_attention", "full_attention"], "mamba_num_heads": 8, "mamba_head_dim": 8},
        **{"ssm_state_size": 16, "n_groups": 1, "chunk_size": 8, "num_hidden_layers": None},
    },
    "granitemoehybrid": {
        **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_chunk_size": 8},
        **{"shared_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"], "head_dim": None},
    },
    **{name: {"layer_types": ["linear_attention", "full_attention"]} for name in ("olmo_hybrid", "qwen3_5_text")},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    **{
        name: {
            **{"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4},
            **{"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 64},
            **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim")),
            **{"decoder_start_token_id": 0},
        }
        for name in OF_T5
    },
    **{
        name: {
            **{"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
            **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 2},
            **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim")),
            **{"num_mel_bins": 8, "max_source_positions": 256, "max_target_positions": 256},
        }
        for name in OF_BART
    },
    "swin": {
        **{"image_size": 64, "embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4},
        **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim")),
    },
    "qwen3_next": {
        **{
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        **{"layer_types": ["linear_attention", "full_attention"]},
    },
}
OWN_ODD = {
    "mamba2": {"num_heads": 9, "head_dim": 8},
    **{name: {"hidden_size": 40} for name in ("falcon", "helium", "olmoe")},
    **{name: {"partial_rotary_factor": 0.4} for name in ("phi", "nemotron", "glm", "glm4")},
    "persimmon": {"hidden_size": 40, "partial_rotary_factor": 0.4},
    **{name: {"d_model": 36, "d_kv": 10, "d_ff": 50} for name in OF_T5},
    **{name: {"d_model": 36, "encoder_ffn_dim": 50, "decoder_ffn_dim": 50} for name in OF_BART},
    **{name: {"hidden_size": 40} for name in ("bitnet", "modernbert-decoder")},
    "swin": {"embed_dim": 36},
    "zamba2": {"hidden_size": 36, "n_mamba_heads": 9},
    "granitemoehybrid": {"hidden_size": 36, "mamba_n_heads": 9},
    "bamba": {"mamba_n_heads": 9},
    "falcon_h1": {"mamba_d_ssm": 72, "mamba_n_heads": 9},
}
COLUMNS = ("family", "alone", "decode", "odd", "training", "from stock", "left to PyTorch")


def build(family: str, dtype: torch.dtype, **more: object) -> torch.nn.Module:
    """A converted model, with its report."""
    sizes = {**SIZES, **EXPERTS, **more, **OWN.get(family, {}), **(OWN_ODD.get(family, {}) if more else {})}
    config = transformers.CONFIG_MAPPING[family](**{name: x for name, x in sizes.items() if x is not None})
    torch.manual_seed(0)
    model = getattr(transformers, AUTO.get(family, "AutoModelForCausalLM")).from_config(config).eval()
    for parameter in model.parameters():  # so that attention does more than average
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model = model.to(dtype)
    pydet.torch.register_attention()
    if "pydet" in transformers.AttentionInterface() and getattr(model, "_can_set_attn_implementation", lambda: True)():
        model.set_attn_implementation("pydet")
    pydet.torch.convert(model)
    return model


def ids_of(model: torch.nn.Module, rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(3, model.config.get_text_config().vocab_size, (rows, tokens))


def batch_of(model: torch.nn.Module, rows: int, tokens: int) -> dict[str, torch.Tensor | bool]:
    """What the model's forward takes."""
    if model.main_input_name == "pixel_values":
        size = model.config.image_size
        return {"pixel_values": torch.randn(rows, 3, size, size).to(model.dtype)}
    batch = {"input_ids": ids_of(model, rows, tokens), "use_cache": False}
    if model.main_input_name == "input_features":
        length = 2 * model.config.max_source_positions
        batch["input_features"] = torch.randn(rows, model.config.num_mel_bins, length).to(model.dtype)
        del batch["input_ids"]
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = ids_of(model, rows, tokens)
    return batch


def cut(batch: dict[str, torch.Tensor | bool], rows: int) -> list[dict[str, torch.Tensor | bool]]:
    """The batch in parts of so many rows."""
    parts = {name: x.split(rows) for name, x in batch.items() if isinstance(x, torch.Tensor)}
    return [{**batch, **dict(zip(parts, each, strict=True))} for each in zip(*parts.values(), strict=True)]


def seen(model: torch.nn.Module) -> pydet.torch.Check:
    """Three sequences, of which the second is padded on the left, or on the right where the family counts positions
    from the left whatever the mask is; or three images, or sounds."""
    batch, mask = batch_of(model, 3, 11), torch.ones(3, 11, dtype=torch.long)
    mask[1, slice(7, None) if model.config.model_type in OF_BART else slice(4)] = 0
    if "input_ids" in batch:
        batch["attention_mask"] = mask
    with pydet.torch.override_aten():
        return pydet.torch.check(model, batch)


def takes_places(model: torch.nn.Module) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters


def cache_of(step: transformers.utils.ModelOutput) -> dict[str, object]:
    """What a step left for the next one, by the name that the family has for it in this version of Transformers."""
    name = next(name for name in ("cache", "past_key_values", "cache_params") if name in step)
    return {name: step[name]}


def decoded(model: torch.nn.Module, gradients: bool = False) -> int:
    """Elements of logits that differ; with gradients, where nothing switched autograd off."""
    batch, cache, steps = batch_of(model, 2, 9), {}, []
    if "input_ids" not in batch:
        raise ValueError("it has no tokens")
    ids = batch.pop("decoder_input_ids" if model.config.is_encoder_decoder else "input_ids")
    with torch.set_grad_enabled(gradients), pydet.torch.override_aten():
        what = "input_ids"
        if model.config.is_encoder_decoder:  # which reads the other tokens once
            what, batch = "decoder_input_ids", {"encoder_outputs": model.get_encoder()(batch["input_ids"])}
        else:
            batch = {}
        whole = model(**batch, **{what: ids}, use_cache=False).logits
        for i in range(ids.shape[1]):
            places = {"position_ids": torch.full((2, 1), i)} if takes_places(model) else {}
            step = model(**batch, **{what: ids[:, i : i + 1]}, use_cache=True, **places, **cache)
            cache = cache_of(step)
            steps.append(step.logits)
    return int((torch.cat(steps, 1) != whole).sum())


def gradients_that_differ(model: torch.nn.Module) -> dict[str, tuple[int, str]]:
    """How many elements of each parameter's gradient differ, in main_grad or, of what accumulate_gradients leaves, in
    grad; and what it said of the parameter as it was switched on."""
    found, tokens = pydet.torch.accumulate_gradients(model), pydet.DWEIGHT_ROWS
    batch = batch_of(model, 2, tokens)
    tokens_of = [batch[name] for name in ("decoder_input_ids", "input_ids") if name in batch]
    labels = tokens_of[0] if tokens_of else torch.arange(2)[:, None]

    def gradients(rows: int) -> dict[str, torch.Tensor]:
        for parameter in found:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        model.zero_grad()
        for part, wanted in zip(cut(batch, rows), labels.split(rows), strict=True):
            with pydet.torch.override_aten():
                logits = model(**part).logits
                logits = logits.view(*wanted.shape, -1)
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum").backward()
        both = {name: getattr(p, "main_grad", p.grad) for name, p in model.named_parameters()}
        return {name: x.clone() for name, x in both.items() if x is not None}

    whole, parts = gradients(2), gradients(1)
    said = {
        **dict.fromkeys(found.cut, "cut"),
        **dict.fromkeys(found.repeated, "repeated"),
        **dict.fromkeys(found.outside, "in grad"),
        **dict.fromkeys(found.summed, "summed by PyTorch"),
    }
    differ = {name: int((whole[name] != parts[name]).sum()) for name in whole}
    return {name: (n, said.get(name, "not named")) for name, n in differ.items() if n}


def trained(model: torch.nn.Module) -> int:
    """Elements of gradients that differ."""
    return sum(n for n, _ in gradients_that_differ(model).values())


def cell(measure: object) -> str:
    try:
        return f"{measure():,}"  # type: ignore[operator]
    except pydet.InvalidValue as problem:  # shapes that do not fit are no refusal
        print(f"    {type(problem).__name__}: {problem}".splitlines()[0][:160], file=sys.stderr)
        return "-"
    except pydet.Error:
        return "refused"
    except Exception as problem:  # a family that does not run so
        print(f"    {type(problem).__name__}: {problem}".splitlines()[0][:160], file=sys.stderr)
        return "-"


def odd_widths(family: str, dtype: torch.dtype) -> int:
    model, threads = build(family, dtype, **ODD), torch.get_num_threads()
    batch = batch_of(model, 3, 7)
    try:
        with torch.no_grad(), pydet.torch.override_aten():
            torch.set_num_threads(2)
            together = model(**batch).logits
            torch.set_num_threads(1)
            alone = torch.cat([model(**part).logits for part in cut(batch, 1)])
    finally:
        torch.set_num_threads(threads)
    return int((together != alone).sum())


def row(family: str) -> list[str]:
    """A line of the table."""
    cells: dict[str, list[str]] = {name: [] for name in COLUMNS[1:5]}
    far, left, gradients = [], [], []
    for dtype in (torch.float32, torch.bfloat16):
        try:
            model = build(family, dtype)
        except Exception as problem:  # a family that wants other settings
            print(f"    {type(problem).__name__}: {problem}".splitlines()[0][:160], file=sys.stderr)
            return [family, *["-"] * (len(COLUMNS) - 1)]
        checked: list[pydet.torch.Check] = []

        def alone(checked=checked, model=model) -> int:
            checked.append(seen(model))
            return checked[0].elements[0]

        cells["alone"].append(cell(alone))
        cells["decode"].append(cell(lambda model=model: decoded(model)))
        cells["odd"].append(cell(lambda dtype=dtype: odd_widths(family, dtype)))
        differ: dict[str, tuple[int, str]] = {}

        def training(model=model, differ=differ) -> int:
            differ.update(gradients_that_differ(model))
            return sum(n for n, _ in differ.values())

        cells["training"].append(cell(training))
        gradients += [f"{'.'.join(name.split('.')[-2:])} ({said})" for name, (_, said) in differ.items()]
        far += [f"{x.difference:.1g} of {x.largest:.1g}" for x in checked if x.difference is not None]
        modules = dict(model.named_modules())
        of = [modules[name] for x in checked for name in x.left]
        left += [type(module).__name__ for module in of if not isinstance(module, torch.nn.Embedding)]
    what = ", ".join(dict.fromkeys(left)) or "nothing"
    if gradients:
        what += "; gradients: " + ", ".join(dict.fromkeys(gradients))
    return [family, *(", ".join(cells[name]) for name in COLUMNS[1:5]), "; ".join(far) or "-", what]


def table(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in [list(COLUMNS), ["---"] * len(COLUMNS), *rows]]
    return "\n".join(lines) + "\n"


def page(rows: list[list[str]]) -> str:
    """docs/families.md."""
    cells = [x for line in rows for column in line[1:5] for x in column.split(", ") if x != "-"]
    counted = {what: sum(x == what for x in cells) for what in ("0", "refused")}
    other = len(cells) - sum(counted.values())
    versions = f"Transformers {transformers.__version__}, PyTorch {torch.__version__.partition('+')[0]}, on a CPU"
    ran = sum(line[1] != "-" for line in rows)
    return (
        "# Families of models\n\n"
        "`python -m bench.families` makes this page. It makes minute models with random weights, two layers of width\n"
        "32, converts them, and runs them under `override_aten()` with pydet's attention. A cell has the number of\n"
        "elements that differ in float32, and in bfloat16.\n\n"
        "- alone: logits of three sequences, one padded on the left (of BART and its like on the right, since they\n"
        "  count positions from there), in a batch and each alone, with its padding and without it.\n"
        "- decode: logits of tokens that came one by one, with a cache, and in one prefill; of T5 and its like in the\n"
        "  decoder.\n"
        "- odd: as alone, at widths that are no multiples of 8, alone on one thread and in the batch on two.\n"
        "- training: gradients of all parameters, of a batch and of its sequences one by one, without\n"
        "  `position_ids`.\n\n"
        "`-` is what did not run so minute. From stock: the largest difference of a logit, and the largest logit;\n"
        "where a router chooses, rounding may change its choice in bfloat16. Left to PyTorch: the classes of modules\n"
        "whose own code calls operators of PyTorch that sum, choose or depend on a place, without embeddings; and the\n"
        "parameters whose gradients differ, with what `accumulate_gradients` says of them: it stays in `grad`\n"
        "(`outside`), or PyTorch sums it over the batch before (`summed`), or its module is called several times\n"
        "(`repeated`), or has rows that the batch's parts do not end with (`cut`).\n\n"
        f"{versions}: {ran} families ran; of {len(cells)} cells {counted['0']} are 0,\n"
        f"{counted['refused']} refused, and {other} have elements that differ.\n\n"
        "Not in the table, since some of their cells differ: MiniMax, Qwen4-Exp, Bailing's hybrid, RWKV, xLSTM and\n"
        "RecurrentGemma, whose scans stay PyTorch's; the experts of Inkling, in training; RoFormer, TrOCR and\n"
        "BigBird-Pegasus, whose positions count padding; CPM-Ant and Dory, whose decoding is another function than\n"
        "their prefill in stock Transformers too.\n\n" + table(rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.families", description=__doc__.splitlines()[0])
    parser.add_argument(
        "families", nargs="*", metavar="family", help="as Transformers calls it; default: all, into docs"
    )
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    if unknown := [name for name in options.families if name not in transformers.CONFIG_MAPPING]:
        parser.error(f"no such family: {', '.join(unknown)}")
    rows = []
    for family in options.families or FAMILIES:
        started = time.monotonic()
        rows.append(row(family))
        print(" | ".join(rows[-1]), f"({time.monotonic() - started:.0f} s)", file=sys.stderr, flush=True)
    if options.families:
        print(table(rows), end="")
    else:
        pathlib.Path(__file__).parents[1].joinpath("docs", "families.md").write_text(page(rows))


if __name__ == "__main__":
    main()
