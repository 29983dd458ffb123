"""What is published of each preset: its parameters, and of some the bytes of KV cache a token.

The counts were not computed by this package. Sources:

- INDEX: half the `total_size` of the model's own model.safetensors.index.json, whose weights are in bfloat16
- HUB: the count that the Hugging Face Hub shows, from the headers of the model's safetensors files
- CARD: the count in the model's card or repository
"""

INDEX = "model.safetensors.index.json"
HUB = "the Hub's count of the files"
CARD = "the model's card"


def without_prediction_layer(total, hidden, layer):
    """Without GLM-4.5's layer for multi-token prediction: a layer, an embedding, a head, a projection, three norms."""
    return total - hidden * (2 * 151552 + 2 * hidden + 3) - layer


def without_vision(total, hidden):
    """Without what of Gemma 3 reads images: a tower of width 1,152, and a projection to the hidden size with a norm."""
    return total - 416_866_032 - 1152 * (hidden + 1)


# By preset: the number of parameters, and its source.
PARAMETERS = {
    "qwen2-0.5b": (494_032_768, HUB),
    "qwen2-1.5b": (1_543_714_304, HUB),
    "qwen2-7b": (7_615_616_512, INDEX),
    "qwen2-72b": (72_706_203_648, INDEX),
    "qwen2.5-0.5b": (494_032_768, HUB),
    "qwen2.5-1.5b": (1_543_714_304, HUB),
    "qwen2.5-3b": (6_171_877_376 // 2, INDEX),
    "qwen2.5-7b": (15_231_233_024 // 2, INDEX),
    "qwen2.5-14b": (29_540_067_328 // 2, INDEX),
    "qwen2.5-32b": (65_527_752_704 // 2, INDEX),
    "qwen2.5-72b": (145_412_407_296 // 2, INDEX),
    "qwen3-0.6b": (751_632_384 - 151936 * 1024, HUB),  # of whose files a head is a copy of the embedding
    "qwen3-1.7b": (2_031_739_904 - 151936 * 2048, HUB),
    "qwen3-4b": (8_044_936_192 // 2, INDEX),
    "qwen3-8b": (16_381_470_720 // 2, INDEX),
    "qwen3-14b": (29_536_614_400 // 2, INDEX),
    "qwen3-32b": (65_524_246_528 // 2, INDEX),
    "qwen3-30b-a3b": (61_064_245_248 // 2, INDEX),
    "qwen3-235b-a22b": (470_187_269_120 // 2, INDEX),
    "qwen3-coder-480b-a35b": (480_154_875_392, HUB),
    "deepseek-v3-671b": (671_026_419_200, HUB),  # of the main model, without the scales of its fp8 weights
    "deepseek-r1-671b": (671_026_419_200, HUB),
    "moonlight-16b-a3b": (15_960_110_208, HUB),
    "kimi-k2-1t": (1_026_408_232_448, HUB),
    "deepseek-r1-distill-qwen-1.5b": (3_554_176_000 // 2, HUB),
    "deepseek-r1-distill-qwen-7b": (7_615_616_512, HUB),
    "deepseek-r1-distill-qwen-14b": (14_770_033_664, HUB),
    "deepseek-r1-distill-qwen-32b": (32_763_876_352, HUB),
    "deepseek-r1-distill-llama-8b": (8_030_261_248, HUB),
    "deepseek-r1-distill-llama-70b": (70_553_706_496, HUB),
    "deepseek-r1-0528-qwen3-8b": (8_190_735_360, HUB),
    "deepseek-llm-7b": (6_910_365_696, HUB),
    "deepseek-coder-6.7b": (6_740_512_768, HUB),
    "llama2-7b": (6_738_415_616, HUB),
    "llama2-13b": (13_015_864_320, HUB),
    "llama2-70b": (68_976_648_192, HUB),
    "llama3-8b": (16_060_522_496 // 2, INDEX),
    "llama3-70b": (141_107_412_992 // 2, INDEX),
    "llama3.1-8b": (8_030_261_248, HUB),
    "llama3.1-70b": (141_107_412_992 // 2, INDEX),
    "llama3.1-405b": (811_706_777_600 // 2, INDEX),
    "llama3.2-1b": (1_235_814_400, HUB),
    "llama3.2-3b": (3_212_749_824, HUB),
    "llama3.3-70b": (70_553_706_496, HUB),
    "tinyllama-1.1b": (1_100_048_384, HUB),
    "smollm2-135m": (134_515_008, HUB),
    "smollm2-360m": (361_821_120, HUB),
    "smollm2-1.7b": (1_711_376_384, HUB),
    "mistral-7b-v0.1": (14_483_464_192 // 2, INDEX),
    "mistral-7b-v0.2": (14_483_464_192 // 2, INDEX),
    "mistral-7b-v0.3": (14_496_047_104 // 2, INDEX),
    "ministral-8b": (8_019_808_256, HUB),
    "mistral-nemo-12b": (24_495_564_800 // 2, INDEX),
    "mistral-small-22b": (22_247_282_688, HUB),
    "mistral-small-24b": (23_572_403_200, HUB),
    "mistral-large-123b": (122_610_069_504, HUB),
    "mixtral-8x7b-v0.1": (93_405_585_408 // 2, INDEX),
    "mixtral-8x22b-v0.1": (281_241_268_224 // 2, INDEX),
    "mixtral-8x22b-v0.3": (140_630_071_296, HUB),
    "minimax-m2-230b-a10b": (228_689_764_864, HUB),
    "gpt-oss-20b": (20_914_757_184, CARD),
    "gpt-oss-120b": (116_829_156_672, CARD),
    "olmo2-1b": (1_484_916_736, HUB),
    "olmo2-7b": (7_298_617_344, HUB),
    "olmo2-13b": (13_716_198_400, HUB),
    "olmo2-32b": (32_234_279_936, HUB),
    "olmo3-7b": (7_298_011_136, HUB),
    "olmo3-32b": (32_233_522_176, HUB),
    "smollm3-3b": (3_075_098_624, HUB),
    "granite3.0-2b": (2_533_531_648, HUB),
    "granite3.0-8b": (8_170_848_256, HUB),
    "granite3.3-2b": (2_533_539_840, HUB),
    "granite3.3-8b": (8_170_864_640, HUB),
    "seed-oss-36b": (36_151_104_512, HUB),
    "phi3-mini-4k": (3_821_079_552, HUB),
    "phi3-mini-128k": (7_642_159_104 // 2, INDEX),
    "phi3-medium-4k": (13_960_238_080, HUB),
    "phi3-medium-128k": (13_960_238_080, HUB),
    "phi3.5-mini": (3_821_079_552, HUB),
    "phi4-14b": (29_319_014_400 // 2, INDEX),
    "phi4-mini": (3_836_021_760, HUB),
    "glm4-9b-hf": (9_399_951_360, HUB),
    "glm4-9b-0414": (9_400_279_040, HUB),
    "glm4-32b-0414": (32_566_081_536, HUB),
    "glm4.5-355b-a32b": (without_prediction_layer(358_337_791_296, 5120, 3_935_625_632), HUB),
    "glm4.5-air-106b-a12b": (without_prediction_layer(110_468_824_832, 4096, 2_341_492_864), HUB),
    "gemma-2b": (2_506_172_416, HUB),
    "gemma-7b": (8_537_680_896, HUB),
    "gemma2-2b": (2_614_341_888, HUB),
    "gemma2-9b": (9_241_705_984, HUB),
    "gemma2-27b": (27_227_128_320, HUB),
    "gemma3-270m": (268_098_176, HUB),
    "gemma3-1b": (999_885_952, HUB),
    "gemma3-4b": (without_vision(4_300_079_472, 2560), HUB),
    "gemma3-12b": (without_vision(12_187_325_040, 3840), HUB),
    "gemma3-27b": (without_vision(27_432_406_640, 5376), HUB),
}
# Bytes of KV cache a token in bfloat16: table 1 of arXiv:2505.09343.
CACHE = {"deepseek-v3-671b": 70_272, "qwen2.5-72b": 327_680, "llama3.1-405b": 516_096}


# Of presets without a published count: billions of parameters as published, rounded to the digits here. Sources are
# names and cards.
ROUNDED = {
    "qwen3-next-80b-a3b": "80",
    "qwen3.5-0.8b": "0.8",
    "qwen3.5-4b": "4",
    "qwen3.5-9b": "9",
    "qwen3.5-27b": "27",
    "qwen3.5-35b-a3b": "35",
    "qwen3.5-122b-a10b": "122",
    "qwen3.5-397b-a17b": "396",  # and 0.5 that read images
    "nemotron-h-8b": "8.1",
    "nemotron-h-47b": "46.8",
    "nemotron-h-56b": "56.3",
    "nemotron-nano-9b-v2": "8.9",
    "nemotron-nano-12b-v2": "12.3",
    "nemotron-3-nano-30b-a3b": "31.6",
    "granite4.0-350m": "0.35",
    "granite4.0-1b": "1.6",
    "granite4.0-micro": "3.4",
    "granite4.0-h-350m": "0.34",
    "granite4.0-h-1b": "1.5",
    "granite4.0-h-micro": "3.2",
    "granite4.0-h-tiny": "7",
    "granite4.0-h-small": "32",
}
