"""Published models and what they need, for `jaxserve models list`.

`tests/test_models_list.py` computes the same figures from the models' published configs.
"""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """A published model.

    Attributes:
      name: the repository on the hub.
      family: the name of its family in `jaxserve.models.families`.
      parameters: how many numbers its weights have.
      int4_bytes: size of the weights with --quantization int4.
      token_bytes: size of a token's keys and values in bfloat16, in all layers.
    """

    name: str
    family: str
    parameters: int
    int4_bytes: int
    token_bytes: int

    @property
    def bf16_bytes(self) -> int:
        return 2 * self.parameters


PUBLISHED = (
    Published("CohereForAI/c4ai-command-r-v01", "cohere", 34_980_831_232, 21_150_449_664, 1_310_720),
    Published("CohereForAI/c4ai-command-r7b-12-2024", "cohere2", 8_028_033_024, 5_696_135_168, 131_072),
    Published("LGAI-EXAONE/EXAONE-4.0-32B", "exaone4", 32_003_216_384, 18_059_143_168, 262_144),
    Published("tiiuae/falcon-7b", "falcon", 6_921_720_704, 4_019_099_392, 8_192),
    Published("tiiuae/falcon-11B", "falcon", 11_102_822_400, 6_516_326_400, 245_760),
    Published("tiiuae/falcon-40b", "falcon", 41_303_293_952, 22_090_645_504, 122_880),
    Published("google/gemma-2b", "gemma", 2_506_172_416, 2_070_749_184, 18_432),
    Published("google/gemma-2-9b-it", "gemma2", 9_241_705_984, 6_129_285_120, 344_064),
    Published("google/gemma-3-1b-it", "gemma3", 999_885_952, 964_300_288, 26_624),
    Published("google/gemma-3-4b-it", "gemma3", 3_880_263_168, 2_998_433_792, 139_264),
    Published("google/gemma-3-27b-it", "gemma3", 27_009_346_304, 16_023_833_600, 507_904),
    Published("google/gemma-3n-E4B-it", "gemma3n", 6_835_235_568, 7_874_600_416, 40_960),
    Published("google/gemma-4-31B-it", "gemma4", 30_807_445_820, 17_978_974_840, 901_120),
    Published("zai-org/GLM-4-9B-0414", "glm4", 9_400_279_040, 6_691_143_680, 40_960),
    Published("openai-community/gpt2", "gpt2", 124_439_808, 122_804_736, 36_864),
    Published("bigcode/starcoder", "gpt_bigcode", 15_517_456_384, 8_528_211_968, 20_480),
    Published("EleutherAI/gpt-neo-2.7B", "gpt_neo", 2_651_307_520, 1_567_063_040, 327_680),
    Published("EleutherAI/gpt-j-6b", "gptj", 6_050_882_784, 3_734_129_088, 458_752),
    Published("EleutherAI/pythia-6.9b", "gpt_neox", 6_857_302_016, 4_151_590_912, 524_288),
    Published("EleutherAI/gpt-neox-20b", "gpt_neox", 20_554_567_680, 11_523_563_520, 1_081_344),
    Published("ibm-granite/granite-3.3-8b-instruct", "granite", 8_170_864_640, 4_512_481_280, 163_840),
    Published("ibm-granite/granite-4.0-h-tiny", "granite_moe_hybrid", 6_939_037_248, 3_813_836_544, 8_192),
    Published("tencent/Hunyuan-7B-Instruct", "hunyuan", 7_504_568_320, 4_649_205_760, 131_072),
    Published("internlm/internlm3-8b-instruct", "internlm3", 8_804_241_408, 6_102_982_656, 49_152),
    Published("moonshotai/Kimi-Linear-48B-A3B-Instruct", "kimi_linear", 49_122_681_728, 26_517_860_608, 8_064),
    Published("LiquidAI/LFM2-1.2B", "lfm2", 1_170_340_608, 802_878_976, 12_288),
    Published("HuggingFaceTB/SmolLM-135M", "llama", 134_515_008, 111_712_896, 23_040),
    Published("HuggingFaceTB/SmolLM2-360M-Instruct", "llama", 361_821_120, 257_374_080, 40_960),
    Published("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "llama", 1_100_048_384, 761_909_248, 22_528),
    Published("meta-llama/Llama-3.2-1B-Instruct", "llama", 1_235_814_400, 1_027_215_360, 32_768),
    Published("HuggingFaceTB/SmolLM2-1.7B-Instruct", "llama", 1_711_376_384, 1_031_999_488, 196_608),
    Published("meta-llama/Llama-3.2-3B-Instruct", "llama", 3_212_749_824, 2_241_681_408, 114_688),
    Published("meta-llama/Llama-2-7b-hf", "llama", 6_738_415_616, 3_864_010_752, 524_288),
    Published("deepseek-ai/deepseek-llm-7b-chat", "llama", 6_910_365_696, 4_808_712_192, 491_520),
    Published("tiiuae/Falcon3-7B-Instruct", "llama", 7_455_550_464, 5_039_904_768, 114_688),
    Published("meta-llama/Meta-Llama-3-8B-Instruct", "llama", 8_030_261_248, 5_700_591_616, 131_072),
    Published("ByteDance-Seed/Seed-Coder-8B-Instruct", "llama", 8_250_462_208, 6_140_993_536, 131_072),
    Published("01-ai/Yi-1.5-9B-Chat", "llama", 8_829_407_232, 5_331_492_864, 98_304),
    Published("upstage/SOLAR-10.7B-Instruct-v1.0", "llama", 10_731_524_096, 5_923_151_872, 196_608),
    Published("meta-llama/Llama-2-13b-chat-hf", "llama", 13_015_864_320, 7_198_320_640, 819_200),
    Published("01-ai/Yi-34B-Chat", "llama", 34_388_917_248, 19_094_992_896, 245_760),
    Published("meta-llama/Llama-2-70b-hf", "llama", 68_976_648_192, 36_346_281_984, 327_680),
    Published("meta-llama/Meta-Llama-3-70B-Instruct", "llama", 70_553_706_496, 39_500_398_592, 327_680),
    Published("meta-llama/Llama-3.1-405B-Instruct", "llama", 405_853_388_800, 215_512_678_400, 516_096),
    Published("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4", 107_769_861_120, 58_646_538_240, 196_608),
    Published("openbmb/MiniCPM-2B-sft-bf16", "minicpm", 2_724_880_896, 1_825_108_992, 368_640),
    Published("mistralai/Mistral-7B-v0.1", "mistral", 7_241_732_096, 4_123_533_312, 131_072),
    Published("mistralai/Ministral-8B-Instruct-2410", "mistral", 8_019_808_256, 5_729_492_992, 147_456),
    Published("mistralai/Mistral-Nemo-Instruct-2407", "mistral", 12_247_782_400, 8_308_172_800, 163_840),
    Published("mistralai/Codestral-22B-v0.1", "mistral", 22_247_282_688, 12_069_974_016, 229_376),
    Published("mistralai/Mistral-Small-24B-Instruct-2501", "mistral", 23_572_403_200, 14_147_430_400, 163_840),
    Published("mistralai/Mistral-Large-Instruct-2407", "mistral", 122_610_069_504, 64_419_422_208, 360_448),
    Published("nvidia/Minitron-4B-Base", "nemotron", 4_190_509_056, 4_496_443_392, 131_072),
    Published("allenai/OLMo-7B-hf", "olmo", 6_888_095_744, 4_163_371_008, 524_288),
    Published("allenai/OLMo-2-1124-7B", "olmo2", 7_298_617_344, 4_984_414_208, 524_288),
    Published("facebook/opt-350m", "opt", 331_196_416, 214_126_592, 98_304),
    Published("microsoft/phi-2", "phi", 2_779_683_840, 1_823_815_680, 327_680),
    Published("microsoft/Phi-3-mini-4k-instruct", "phi3", 3_821_079_552, 2_262_964_224, 393_216),
    Published("Qwen/Qwen2-0.5B-Instruct", "qwen2", 494_032_768, 456_916_736, 12_288),
    Published("Qwen/Qwen2.5-1.5B-Instruct", "qwen2", 1_543_714_304, 1_142_606_848, 28_672),
    Published("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "qwen2", 1_777_088_000, 1_609_354_240, 28_672),
    Published("Qwen/Qwen2.5-3B-Instruct", "qwen2", 3_085_938_688, 2_053_431_296, 36_864),
    Published("Qwen/Qwen2-7B-Instruct", "qwen2", 7_615_616_512, 5_545_257_984, 57_344),
    Published("Qwen/Qwen2.5-32B-Instruct", "qwen2", 32_763_876_352, 19_206_907_904, 262_144),
    Published("Qwen/Qwen2.5-72B-Instruct", "qwen2", 72_706_203_648, 41_190_506_496, 327_680),
    Published("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2", 7_615_616_512, 5_545_257_984, 57_344),
    Published("Qwen/Qwen3-0.6B", "qwen3", 596_049_920, 538_378_240, 114_688),
    Published("Qwen/Qwen3-4B", "qwen3", 4_022_468_096, 2_651_732_992, 147_456),
    Published("Qwen/Qwen3-8B", "qwen3", 8_190_735_360, 6_071_347_200, 147_456),
    Published("Qwen/Qwen3-32B", "qwen3", 32_762_123_264, 19_203_401_728, 262_144),
    Published("ByteDance-Seed/Seed-OSS-36B-Instruct", "seed_oss", 36_151_104_512, 21_000_628_224, 262_144),
    Published("HuggingFaceTB/SmolLM3-3B", "smollm3", 3_075_098_624, 1_975_717_888, 73_728),
    Published("stabilityai/stablelm-2-1_6b", "stablelm", 1_644_515_328, 1_458_610_176, 196_608),
    Published("bigcode/starcoder2-7b", "starcoder2", 7_173_923_840, 4_037_724_160, 65_536),
    Published("mistralai/Mixtral-8x7B-v0.1", "mixtral", 46_702_792_704, 24_472_199_168, 131_072),
    Published("Qwen/Qwen3-30B-A3B", "qwen3_moe", 30_532_122_624, 16_685_887_488, 98_304),
    Published("Qwen/Qwen3-235B-A22B", "qwen3_moe", 235_093_634_560, 123_142_036_480, 192_512),
    Published("openai/gpt-oss-20b", "gpt_oss", 20_914_757_184, 12_621_184_128, 49_152),
    Published("openai/gpt-oss-120b", "gpt_oss", 116_829_156_672, 62_662_806_144, 73_728),
    Published("allenai/OLMoE-1B-7B-0924", "olmoe", 6_919_161_856, 3_876_851_712, 131_072),
    Published("MiniMaxAI/MiniMax-M2", "minimax_m2", 228_689_764_864, 119_816_404_992, 253_952),
    Published("deepseek-ai/DeepSeek-V3", "deepseek_v3", 671_026_419_200, 350_427_728_896, 70_272),
    Published("deepseek-ai/DeepSeek-V3.2", "deepseek_v3", 671_877_944_064, 350_908_358_144, 85_888),
    Published("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3_next", 79_674_391_296, 42_083_215_360, 24_576),
    Published("Qwen/Qwen3.5-9B", "qwen3_5", 8_953_803_264, 7_638_495_232, 32_768),
    Published("Qwen/Qwen3.5-35B-A3B", "qwen3_5_moe", 34_660_610_688, 19_414_981_632, 20_480),
)
