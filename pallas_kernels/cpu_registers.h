// Registers of floats, and conversions to them from the types that pages hold.
//
// Written in the vector extensions of GCC and Clang, which compile for AVX-512, AVX2, SSE and Arm's NEON. Each of the
// few intrinsics, for 16-bit floats, has a plain alternative beside it.

#pragma once

#include <algorithm>
#include <type_traits>

#include "cpu_vectors.h"

typedef uint32_t Bits __attribute__((vector_size(4 * kWidth)));
typedef uint16_t Shorts __attribute__((vector_size(2 * kWidth), aligned(2)));
typedef int16_t SignedShorts __attribute__((vector_size(2 * kWidth)));
typedef int8_t Bytes __attribute__((vector_size(kWidth), aligned(1)));

// Transposes kWidth x kWidth numbers.
template <int H = kWidth / 2>
static inline void transpose(Reg* a) {
  for (int i = 0; i < kWidth; i++)
    if (!(i & H)) {
      const Reg low = even<H>(a[i], a[i + H], Lanes()), high = odd<H>(a[i], a[i + H], Lanes());
      a[i] = low, a[i + H] = high;
    }
  if constexpr (H > 1) transpose<H / 2>(a);
}

// Reduces all lanes to one, with an operation on two registers.
template <int H, size_t... I>
static inline Reg swap(Reg v, std::index_sequence<I...>) {
  return __builtin_shufflevector(v, v, static_cast<int>(I ^ H)...);
}
template <class Op, int H = kWidth / 2>
static inline float across(Reg v, Op op) {
  v = op(v, swap<H>(v, Lanes()));
  if constexpr (H > 1)
    return across<Op, H / 2>(v, op);
  else
    return v[0];
}
static inline float highest_of(Reg v) {
  return across(v, [](Reg a, Reg b) { return a > b ? a : b; });
}
static inline float sum_of(Reg v) {
  return across(v, [](Reg a, Reg b) { return a + b; });
}

// exp(x) for x <= 0, to about 2 units in the last place: 2^round(x / ln 2) times a polynomial of the rest. Smaller x
// than -87 count as -87.
static inline Reg exp_of(Reg x) {
  x = x < -87.f ? Reg{} - 87.f : x;
  Reg n = x * 1.44269504f + 12582912.f;  // the addend leaves no bits for a fraction
  const Ints power = ((Ints)n << 23) + (127 << 23);
  n -= 12582912.f;
  const Reg r = x - n * 0.693145752f - n * 1.42860677e-6f;
  const Reg p = 1.f + r * (1.f + r * (0.5f + r * (0.166666657f + r * (0.0416664854f + r * (0.00833345205f + r * 0.00139350991f)))));
  return p * (Reg)power;
}

// Element types of pages. `load` converts kWidth stored numbers to floats, which are the numbers divided by kUnit.
// `round` converts floats to stored bits, rounding to nearest even. 0 has the bits 0.

struct Float32 {
  using Stored = float;
  static constexpr float kUnit = 1;
  static Reg load(const float* p) { return reg(p); }
  static Ints round(Reg x) { return (Ints)x; }
};

struct BFloat16 {
  using Stored = uint16_t;
  static constexpr float kUnit = 1;
  static Reg load(const uint16_t* p) { return (Reg)(__builtin_convertvector(::load<Shorts>(p), Bits) << 16); }
  static Ints round(Reg x) {
    const Ints bits = (Ints)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (bits & INT32_MAX) > 0x7f800000 ? bits >> 16 | 0x40 : rounded;
  }
};

struct Float16 {
  using Stored = uint16_t;
  static constexpr float kUnit = 1;
  static Reg widen(Shorts half) {
#if CPU_WIDTH == 16
    return (Reg)_mm512_cvtph_ps((__m256i)half);
#elif CPU_WIDTH == 8 && defined(__F16C__)
    return (Reg)_mm256_cvtph_ps((__m128i)half);
#else
    // The exponent's bias is 112 less than float's. A subnormal has exponent 1 without a leading one, so 2^-14 is
    // subtracted.
    const Ints all = (Ints)__builtin_convertvector(half, Bits), size = all & 0x7fff;
    const Reg normal = (Reg)((size << 13) + (112 << 23)), small = (Reg)((size << 13) + (113 << 23)) - 0x1p-14f;
    const Reg value = size < 0x400 ? small : normal;
    const Reg found = size < 0x7c00 ? value : (Reg)((size << 13) + (224 << 23));  // infinite, or NaN
    return (Reg)((Ints)found | (all & 0x8000) << 16);
#endif
  }
  static Reg load(const uint16_t* p) { return widen(::load<Shorts>(p)); }
  static Ints round(Reg x) {
    const Ints bits = (Ints)x, size = bits & INT32_MAX;
    // Numbers below 2^-14 are rounded to multiples of 2^-24, the last place of the addend.
    const Ints small = (Ints)((Reg)size + 0.5f) - 0x3f000000, normal = (size - (112 << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    const Ints finite = size < 0x38800000 ? small : normal, large = size > 0x7f800000 ? Ints{} + 0x7e00 : Ints{} + 0x7c00;
    return (size >= 0x477ff000 ? large : finite) | (bits >> 16 & 0x8000);
  }
};

struct Int8 {
  using Stored = int8_t;
  static constexpr float kUnit = 1;
  static Reg load(const int8_t* p) {
    const SignedShorts code = __builtin_convertvector(::load<Bytes>(p), SignedShorts);
    return __builtin_convertvector(__builtin_convertvector(code, Ints), Reg);
  }
  static Ints round(Reg x) { return (Ints)(x + 12582912.f) - 0x4b400000; }  // of numbers up to 127
};

// float8_e4m3fn. Read with a bias of 15 instead of 7, it is a float16 with fewer bits, 2^8 times too small. NaNs become
// +-480 / kUnit.
struct Float8 {
  using Stored = int8_t;
  static constexpr float kUnit = 256;
  static Reg load(const int8_t* p) {
    const SignedShorts code = __builtin_convertvector(::load<Bytes>(p), SignedShorts) << 7;
    return Float16::widen((Shorts)(code & static_cast<int16_t>(0xbfff)));
  }
  static Ints round(Reg x) {  // of numbers up to 448
    const Ints bits = (Ints)x, size = bits & INT32_MAX;
    const Ints small = (Ints)((Reg)size + 0x1p14f) - 0x46800000;  // multiples of 2^-9
    const Ints normal = (size - (120 << 23) + 0x7ffff + (size >> 20 & 1)) >> 20;
    return (size < 0x3c800000 ? small : normal) | (bits >> 24 & 0x80);
  }
};

// Loads fewer than kWidth numbers, followed by zeros.
template <class E>
static inline Reg load_some(const typename E::Stored* p, int64_t count) {
  if (count >= kWidth) return E::load(p);
  typename E::Stored padded[kWidth] = {};
  std::memcpy(padded, p, count * sizeof *p);
  return E::load(padded);
}

// Rounds x and stores its first `count` numbers, up to kWidth.
template <class E>
static inline void store_some(Reg x, typename E::Stored* p, int64_t count) {
  typedef std::make_unsigned_t<std::conditional_t<sizeof *p == 4, int32_t, typename E::Stored>> Number;
  typedef Number Numbers __attribute__((vector_size(sizeof(Number) * kWidth)));
  const Numbers numbers = __builtin_convertvector((Bits)E::round(x), Numbers);
  std::memcpy(p, &numbers, std::min<int64_t>(count, kWidth) * sizeof *p);
}
