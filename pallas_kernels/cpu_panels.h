// Weights in the form that the CPU's products read: panels of 16 rows in sequence. Each panel has a type of its own.
//
// The values of the 16 rows for the same inputs are adjacent. So a vector of the weight is multiplied by one number of
// x, all sums are in the order of the inputs, and memory is read from front to back. Floats are [in][16] (bfloat16 in
// pairs of inputs, [in / 2][16][2]). Quantized panels are records of several blocks of 32 inputs: scales of the 16
// rows, then codes in vectors of 16 rows x 4 inputs, then the bits of codes beyond 4 (or 2). A value is code * scale + shift,
// with codes from 0 on. Codes of formats without even steps, 4-bit floats and IQ4, are indices of a table of 16, which
// lies in a register and has such codes. In NVFP4 each row has a
// gain, which multiplies the sums: 16 float32 after the last record.

#pragma once

#include <cstring>

#include "cpu_kernels.h"
#include "cpu_vectors.h"

constexpr int kPanelRows = 16, kParts = kPanelRows / kWidth;  // a panel has kParts columns of kWidth rows
constexpr int64_t kBlock = 32;                                // inputs of x that share a scale

typedef uint8_t Bytes __attribute__((vector_size(4 * kWidth)));
typedef uint16_t Words __attribute__((vector_size(4 * kWidth)));

static inline float float_of_half(uint16_t half) {  // exact for subnormal numbers, which XLA's threads flush
  const int32_t size = half & 0x7fff, subnormal = (size - 0x400) >> 31;  // 0 or -1
  const float value = __builtin_bit_cast(float, (size << 13) + ((112 - subnormal) << 23)) -
                      __builtin_bit_cast(float, subnormal & 113 << 23);
  return half >> 15 ? -value : value;
}

// Loads kWidth numbers as float32: float16, bytes, signed bytes.
static inline Floats of_halves(const uint8_t* from) {
#if CPU_WIDTH == 16
  return (Floats)_mm512_cvtph_ps(load<__m256i>(from));
#elif CPU_WIDTH == 8 && defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(load<__m128i>(from));
#elif defined(__aarch64__)
  return (Floats)vcvt_f32_f16(load<float16x4_t>(from));
#endif
  Floats made;
  for (int i = 0; i < kWidth; i++) {
    uint16_t half;
    std::memcpy(&half, from + 2 * i, 2);
    made[i] = float_of_half(half);
  }
  return made;
}

template <class Byte>
static inline Floats of_bytes(const uint8_t* from) {
#if CPU_WIDTH == 16
  const __m128i some = load<__m128i>(from);
  return (Floats)_mm512_cvtepi32_ps(Byte(-1) < 0 ? _mm512_cvtepi8_epi32(some) : _mm512_cvtepu8_epi32(some));
#elif CPU_WIDTH == 8
  const __m128i some = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return (Floats)_mm256_cvtepi32_ps(Byte(-1) < 0 ? _mm256_cvtepi8_epi32(some) : _mm256_cvtepu8_epi32(some));
#else
  Floats made;
  for (int i = 0; i < kWidth; i++) made[i] = static_cast<Byte>(from[i]);
  return made;
#endif
}

// Twice the values of 4-bit floats (e2m1), plus 12: integers from 0 to 24.
alignas(16) static constexpr uint8_t kFloat4Values[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
// The values of IQ4_NL and IQ4_XS (kvalues_iq4nl in ggml-common.h), plus 128.
alignas(16) static constexpr uint8_t kNonlinearValues[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                             129, 141, 153, 166, 181, 197, 217, 241};

// table[code] for each code, which must be below 16.
static inline Bytes looked_up(const uint8_t* table, Bytes codes) {
#if CPU_WIDTH == 16 && defined(__AVX512BW__)
  return (Bytes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load<__m128i>(table)), (__m512i)codes);
#elif CPU_WIDTH == 8 && defined(__AVX2__)
  return (Bytes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>(table)), (__m256i)codes);
#elif defined(__aarch64__)
  return (Bytes)vqtbl1q_u8(load<uint8x16_t>(table), (uint8x16_t)codes);
#endif
  for (int i = 0; i < 4 * kWidth; i++) codes[i] = table[codes[i]];
  return codes;
}

// Loads kWidth bytes as integers.
static inline Ints ints_of_bytes(const uint8_t* from) {
  typedef uint8_t Few __attribute__((vector_size(kWidth)));
  return __builtin_convertvector(load<Few>(from), Ints);
}

// Halves of powers of two (e8m0, 2^(code - 127)); 0 for the two smallest, whose halves are subnormal.
static inline Floats half_of_e8m0(const uint8_t* from) {
  const Ints exponent = ints_of_bytes(from) - 1;
  return (Floats)((exponent > 0 ? exponent : Ints{}) << 23);
}

// Halves of float8_e4m3fn, whose exponents have a bias of 7; exponent 0 means multiples of 2^-9. The conversion avoids
// subnormal floats, which XLA's threads flush to zero. NaNs become +-240.
static inline Floats half_of_e4m3(const uint8_t* from) {
  const Ints code = ints_of_bytes(from);
  Floats size = (Floats)(((code & 0x7f) << 20) + (119 << 23));
  size = (code & 0x78) == 0 ? 2 * size - 0x1p-7f : size;
  return (Floats)((Ints)size | (code & 0x80) << 24);
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define CPU_DOTS 512
#elif defined(__AVXVNNI__)
#define CPU_DOTS 256
#else
#define CPU_DOTS 0
#endif
// Whether codes of 8 bits are multiplied as signed bytes, 128 less than they are.
#if !CPU_DOTS && CPU_WIDTH == 8 && defined(__AVX2__) || defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
constexpr bool kCentred = true;
#else
constexpr bool kCentred = false;
#endif

// The sums of products of codes and signed bytes of x from -127 to 127, for the kWidth rows of a group. kTop: the
// highest code, 255 for codes of 8 bits, which are signed where kCentred says so.
template <int kTop>
struct Dots {
  Ints sum = {};

  // Adds the products of the i-th four codes of each row and four bytes of x. i, below `steps`, must be known to the
  // compiler: processors without a product of four bytes add up pairs in 16 bits as long as these cannot overflow.
  inline void add(Bytes codes, int32_t x, int i, int steps) {
#if CPU_DOTS == 512
    sum = (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(x));
#elif CPU_DOTS == 256
    sum = (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, _mm256_set1_epi32(x));
#elif CPU_WIDTH == 16 && defined(__AVX512BW__)
    const __m512i w = (__m512i)codes, all = _mm512_set1_epi32(x);
    if (kTop < 255) return add_pairs(_mm512_maddubs_epi16(w, all), i, steps);
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(w, _mm512_set1_epi16(255)),
                                           _mm512_srai_epi16(_mm512_slli_epi16(all, 8), 8));
    sum += (Ints)even + (Ints)_mm512_madd_epi16(_mm512_srli_epi16(w, 8), _mm512_srai_epi16(all, 8));
#elif CPU_WIDTH == 8 && defined(__AVX2__)
    const __m256i w = (__m256i)codes, all = _mm256_set1_epi32(x);
    if (kTop < 255) return add_pairs(_mm256_maddubs_epi16(w, all), i, steps);
    add_pairs(_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(all, w)), i, steps);
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
    sum = (Ints)vdotq_s32((int32x4_t)sum, vreinterpretq_s8_u8((uint8x16_t)codes), vreinterpretq_s8_s32(vdupq_n_s32(x)));
#else
    for (int row = 0; row < kWidth; row++)
      for (int j = 0; j < 4; j++) sum[row] += codes[4 * row + j] * static_cast<int8_t>(x >> 8 * j);
#endif
  }

 private:
  static constexpr int kRun = std::max(1, 32767 / (2 * 127 * kTop));  // sums of pairs that fit 16 bits
  Ints pairs;

  // `kept` fixes the order: GCC would add only behind the products of all steps, and store each of them.
#if CPU_WIDTH == 16 && defined(__AVX512BW__)
  inline void add_pairs(__m512i more, int i, int steps) {
    pairs = kept(i % kRun ? (Ints)_mm512_add_epi16((__m512i)pairs, more) : (Ints)more);
    if (i % kRun == kRun - 1 || i == steps - 1)
      sum = kept(sum + (Ints)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1)));
  }
#elif CPU_WIDTH == 8 && defined(__AVX2__)
  inline void add_pairs(__m256i more, int i, int steps) {
    pairs = kept(i % kRun ? (Ints)_mm256_add_epi16((__m256i)pairs, more) : (Ints)more);
    if (i % kRun == kRun - 1 || i == steps - 1)
      sum = kept(sum + (Ints)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1)));
  }
#endif
};

enum PanelType : int32_t {
  kFloat32, kFloat16, kBfloat16, kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ4K, kQ5K, kQ6K, kGrouped8, kGrouped4,
  kMxfp4, kNvfp4, kQ2K, kQ3K, kIq4Nl, kIq4Xs
};

// Records. kSub: inputs that share a scale. kBlocks: blocks of a record, or 0 if each panel says. kCodes: offset of the
// codes, which have kLow bits each. kHigh: bits of a code beyond these, stored after the codes. GGUF's types keep the
// numbers of GGUF's own blocks; a record has two of its blocks of 32.
template <int type, int bits, int sub, int blocks, int codes_at>
struct Record {
  static constexpr int kType = type, kBits = bits, kSub = sub, kBlocks = blocks, kCodes = codes_at;
  static constexpr int kLow = bits == 8 ? 8 : bits < 4 ? 2 : 4, kHigh = bits - kLow, kStep = 64 * kLow;
  static constexpr bool kFloat4 = type == kMxfp4 || type == kNvfp4, kNonlinear = type == kIq4Nl || type == kIq4Xs;
  static constexpr int kTop = bits == 8 || kNonlinear ? 255 : kFloat4 ? 24 : (1 << bits) - 1;  // the highest code

  static int64_t bytes(int64_t blocks_of) { return kCodes + blocks_of * (kStep + 64 * kHigh); }

  // Codes of inputs 4 q to 4 q + 3 of a block, for one part of the panel's rows.
  static inline Bytes codes(const uint8_t* record, int64_t blocks_of, int64_t block, int q, int part) {
    const uint8_t* from = record + kCodes + block * kStep + part * 4 * kWidth;
    if (kLow == 8) return load<Bytes>(from + q * 64);
    const Words some = load<Words>(from + (kLow == 4 ? q % 4 : q / 4) * 64);
    Words low = some >> (kLow == 4 ? q / 4 * 4 : q % 4 * 2) & uint16_t(kLow == 4 ? 0x0f0f : 0x0303);
    if (kHigh) {
      from = record + kCodes + blocks_of * kStep + block * 64 * kHigh + part * 4 * kWidth;
      const Words high = load<Words>(from + (kHigh == 2 ? q / 4 * 64 : 0));
      const int shift = (kHigh == 2 ? q % 4 * 2 : q) - kLow;
      low |= (shift < 0 ? high << -shift : high >> shift) & uint16_t((kHigh == 2 ? 0x0303 : 0x0101) << kLow);
    }
    if (kFloat4) return looked_up(kFloat4Values, (Bytes)low);
    return kNonlinear ? looked_up(kNonlinearValues, (Bytes)low) : (Bytes)low;
  }

  // The scale and shift of a group of kSub inputs of a record.
  static inline void scales(const uint8_t* record, int64_t group, int part, Floats& scale, Floats& shift) {
    const auto half = [&](int64_t at) { return of_halves(record + at + part * 2 * kWidth); };
    const auto byte = [&](int64_t at) { return record + at + group * kPanelRows + part * kWidth; };
    if (kType == kQ8_0 || kType == kQ4_0 || kType == kQ5_0) {
      scale = half(group * 32), shift = scale * (kType == kQ8_0 ? -128.f : kType == kQ4_0 ? -8.f : -16.f);
    } else if (kType == kQ4_1 || kType == kQ5_1) {
      scale = half(group * 32), shift = half(64 + group * 32);
    } else if (kType == kIq4Nl) {
      scale = half(group * 32), shift = scale * -128.f;
    } else if (kType == kQ6K || kType == kQ3K || kType == kIq4Xs) {
      scale = half(0) * of_bytes<int8_t>(byte(64));
      shift = scale * (kType == kQ6K ? -32.f : kType == kQ3K ? -4.f : -128.f);
    } else if (kType == kQ2K) {
      const Ints both = ints_of_bytes(byte(64));
      scale = half(0) * __builtin_convertvector(both & 15, Floats);
      shift = -(half(32) * __builtin_convertvector(both >> 4, Floats));
    } else if (kType == kQ4K || kType == kQ5K) {
      scale = half(0) * of_bytes<uint8_t>(byte(64)), shift = -(half(32) * of_bytes<uint8_t>(byte(192)));
    } else if (kFloat4) {
      scale = kType == kMxfp4 ? half_of_e8m0(byte(0)) : half_of_e4m3(byte(0)), shift = scale * -12.f;
    } else {
      scale = load<Floats>(record + part * 4 * kWidth), shift = load<Floats>(record + 64 + part * 4 * kWidth);
    }
  }

  // The same for `Dots`, whose codes of 8 bits may be signed.
  static inline Bytes dot_codes(const uint8_t* record, int64_t blocks_of, int64_t block, int q, int part) {
    const Bytes some = codes(record, blocks_of, block, q, part);
    return kCentred && kTop == 255 ? some ^ 128 : some;
  }
  static inline void dot_scales(const uint8_t* record, int64_t group, int part, Floats& scale, Floats& shift) {
    scales(record, group, part, scale, shift);
    if (kCentred && kTop == 255) shift += scale * 128.f;
  }
};
using Q8_0 = Record<kQ8_0, 8, 32, 2, 64>;
using Q4_0 = Record<kQ4_0, 4, 32, 2, 64>;
using Q4_1 = Record<kQ4_1, 4, 32, 2, 128>;
using Q5_0 = Record<kQ5_0, 5, 32, 2, 64>;
using Q5_1 = Record<kQ5_1, 5, 32, 2, 128>;
using Q4K = Record<kQ4K, 4, 32, 8, 320>;
using Q5K = Record<kQ5K, 5, 32, 8, 320>;
using Q6K = Record<kQ6K, 6, 16, 8, 320>;
using Grouped8 = Record<kGrouped8, 8, 32, 0, 128>;
using Grouped4 = Record<kGrouped4, 4, 32, 0, 128>;
using Mxfp4 = Record<kMxfp4, 4, 32, 4, 64>;
using Nvfp4 = Record<kNvfp4, 4, 16, 4, 128>;
using Q2K = Record<kQ2K, 2, 16, 8, 320>;
using Q3K = Record<kQ3K, 3, 16, 8, 320>;
using Iq4Nl = Record<kIq4Nl, 4, 32, 2, 64>;
using Iq4Xs = Record<kIq4Xs, 4, 32, 8, 192>;

// Calls f(record type) for a quantized type.
template <class F>
static void with_record(int32_t type, F f) {
  if (type == kQ8_0) f(Q8_0());
  if (type == kQ4_0) f(Q4_0());
  if (type == kQ4_1) f(Q4_1());
  if (type == kQ5_0) f(Q5_0());
  if (type == kQ5_1) f(Q5_1());
  if (type == kQ4K) f(Q4K());
  if (type == kQ5K) f(Q5K());
  if (type == kQ6K) f(Q6K());
  if (type == kGrouped8) f(Grouped8());
  if (type == kGrouped4) f(Grouped4());
  if (type == kMxfp4) f(Mxfp4());
  if (type == kNvfp4) f(Nvfp4());
  if (type == kQ2K) f(Q2K());
  if (type == kQ3K) f(Q3K());
  if (type == kIq4Nl) f(Iq4Nl());
  if (type == kIq4Xs) f(Iq4Xs());
}

// Bytes of a panel. `blocks_of`: blocks of a record, if its type does not say.
static int64_t panel_bytes(int32_t type, int64_t in, int64_t blocks_of) {
  int64_t size = in * kPanelRows * 4;
  if (type == kFloat16) size = in * kPanelRows * 2;
  if (type == kBfloat16) size = (in + 1) / 2 * kPanelRows * 4;
  with_record(type, [&](auto record) {
    const int64_t blocks = record.kBlocks ? record.kBlocks : blocks_of, inputs = blocks * kBlock;
    size = (in + inputs - 1) / inputs * record.bytes(blocks) + (type == kNvfp4 ? 4 * kPanelRows : 0);
  });
  return (size + 63) / 64 * 64;
}
