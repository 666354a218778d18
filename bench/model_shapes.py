"""Weights of published models, as (N, K) of x[M, K] @ w[N, K].T, and problems drawn from them at random.

Tables of tiles are fitted to pool(); unseen() has other models, which no table was fitted to, and sizes that are no
whole 64.

A layer's q, k and v are one product, as are gate and up. Under tensor parallelism over 2, 4 or 8 devices, q, k, v, gate
and up are cut along N, o and down along K.
"""

import random
from dataclasses import dataclass

# Hidden size, intermediate size, heads, key and value heads, head size.
MODELS = {
    "Llama 2 7B": (4096, 11008, 32, 32, 128),
    "Llama 2 13B": (5120, 13824, 40, 40, 128),
    "Llama 3.1 8B": (4096, 14336, 32, 8, 128),
    "Llama 3.1 70B": (8192, 28672, 64, 8, 128),
    "Llama 3.1 405B": (16384, 53248, 128, 8, 128),
    "Llama 3.2 1B": (2048, 8192, 32, 8, 64),
    "Llama 3.2 3B": (3072, 8192, 24, 8, 128),
    "Qwen 2.5 0.5B": (896, 4864, 14, 2, 64),
    "Qwen 2.5 1.5B": (1536, 8960, 12, 2, 128),
    "Qwen 2.5 7B": (3584, 18944, 28, 4, 128),
    "Qwen 2.5 32B": (5120, 27648, 40, 8, 128),
    "Qwen 2.5 72B": (8192, 29568, 64, 8, 128),
    "Qwen 3 0.6B": (1024, 3072, 16, 8, 128),
    "Qwen 3 1.7B": (2048, 6144, 16, 8, 128),
    "Qwen 3 4B": (2560, 9728, 32, 8, 128),
    "Qwen 3 8B": (4096, 12288, 32, 8, 128),
    "Qwen 3 14B": (5120, 17408, 40, 8, 128),
    "Qwen 3 32B": (5120, 25600, 64, 8, 128),
    "Gemma 2 2B": (2304, 9216, 8, 4, 256),
    "Gemma 2 9B": (3584, 14336, 16, 8, 256),
    "Gemma 2 27B": (4608, 36864, 32, 16, 128),
    "Gemma 3 4B": (2560, 10240, 8, 4, 256),
    "Gemma 3 12B": (3840, 15360, 16, 8, 256),
    "Gemma 3 27B": (5376, 21504, 32, 16, 128),
    "Mistral Nemo": (5120, 14336, 32, 8, 128),
    "Mistral Small": (5120, 32768, 32, 8, 128),
    "Mistral Large": (12288, 28672, 96, 8, 128),
    "Phi 3 mini": (3072, 8192, 32, 32, 96),
    "Phi 4": (5120, 17920, 40, 10, 128),
}
# Attention of GPT-OSS; of DeepSeek V3 its low ranks, output, dense and shared layers.
OTHERS = [
    *[(5120, 2880), (2880, 4096)],
    *[(1536, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384), (36864, 7168), (7168, 18432)],
    *[(4096, 7168), (7168, 2048)],
]
# The same of models that pool() has not, without those of its sizes.
UNSEEN_MODELS = {
    "Yi 34B": (7168, 20480, 56, 8, 128),
    "Falcon 40B": (8192, 32768, 128, 8, 64),
    "Command R": (8192, 22528, 64, 64, 128),
    "GLM 4 9B": (4096, 13696, 32, 2, 128),
    "StarCoder2 7B": (4608, 18432, 36, 4, 128),
    "InternLM 2 20B": (6144, 16384, 48, 8, 128),
    "Granite 3 8B": (4096, 12800, 32, 8, 128),
    "OLMo 2 1B": (2048, 8192, 16, 16, 128),
    "SmolLM2 1.7B": (2048, 8192, 32, 32, 64),
    "MiniCPM 2B": (2304, 5760, 36, 36, 64),
    "Phi 2": (2560, 10240, 32, 32, 80),
    "GPT-2 XL": (1600, 6400, 25, 25, 64),
    "Whisper large": (1280, 5120, 20, 20, 64),
}
# Vision towers (SigLIP so400m, InternViT, ViT-H, EVA), low ranks with their rotary part (DeepSeek V2, MiniCPM3), heads.
UNSEEN_OTHERS = [
    *[(4304, 1152), (1152, 4304), (3456, 1152), (12800, 3200), (3200, 12800), (5120, 1280), (3420, 1280), (1280, 3420)],
    *[(6144, 1408), (1408, 6144), (640, 2048), (2112, 7168), (2560, 288), (768, 2560), (18432, 7168), (10752, 2688)],
    *[(2688, 10752), (4624, 1156), (1156, 4624), (50304, 1024), (32256, 4312), (4312, 4096), (4096, 4328)],
]
SHARDS = (1, 2, 4, 8)
MOST_ELEMENTS = 1 << 28  # of a weight
UNIT, UNSEEN_UNIT = 16, 4  # an extent is a multiple of it


def weights(models, others, unit):
    """Every (N, K) of multiples of `unit`, each once, in ascending order."""
    found = {(float(n), float(k)) for n, k in others}
    for hidden, inter, heads, kv_heads, size in models.values():
        for shards in SHARDS:
            found |= {((heads + 2 * kv_heads) * size / shards, hidden), (hidden, heads * size / shards)}
            found |= {(2 * inter / shards, hidden), (hidden, inter / shards)}
    whole = {(int(n), int(k)) for n, k in found if n % unit == 0 and k % unit == 0}
    return sorted((n, k) for n, k in whole if n * k <= MOST_ELEMENTS)


def pool():
    return weights(MODELS, OTHERS, UNIT)


def unseen():
    """Each once, but three times where K is no whole 64: a third of what is drawn."""
    found = sorted(set(weights(UNSEEN_MODELS, UNSEEN_OTHERS, UNSEEN_UNIT)) - set(pool()))
    return [shape for shape in found for _ in range(3 if shape[1] % 64 else 1)]


@dataclass(frozen=True)
class Drawn:
    """kind: "forward", "dA" or "dB", of x[m, k] @ w[n, k].T; dtype of the operands, out of the result."""

    kind: str
    m: int
    n: int
    k: int
    dtype: str = "bf16"
    out: str = "bf16"
    k_chunk: int | None = None


def draw(count, seed, most_m=8192, least_m=1, shapes=None):
    """`count` problems of these (N, K), or of pool(): M log-uniform, so half of them odd, everything else uniform."""
    chance, shapes, problems = random.Random(seed), shapes or pool(), []
    for _ in range(count):
        n, k = chance.choice(shapes)
        m = max(least_m, min(most_m, round(least_m * (most_m / least_m) ** chance.random())))
        kind = chance.choices(("forward", "dA", "dB"), (60, 20, 20))[0]
        dtype = chance.choices(("bf16", "fp16"), (85, 15))[0]
        out, chunk = chance.choices(((dtype, None), ("fp32", None), (dtype, 1024)), (80, 10, 10))[0]
        problems.append(Drawn(kind, m, n, k, dtype, out, chunk))
    return problems
