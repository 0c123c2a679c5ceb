// Vectors of floats as wide as the machine's, in the vector extensions of GCC and Clang.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define CPU_WIDTH 16
#elif defined(__AVX2__)
#define CPU_WIDTH 8
#else
#define CPU_WIDTH 4
#endif
constexpr int kWidth = CPU_WIDTH;  // floats in a vector
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef float Reg __attribute__((vector_size(4 * kWidth), aligned(4)));  // at any address
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));

template <class Vector>
static inline Vector load(const void* from) {
  Vector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

// Returns v in a register, where the compiler would load it again at each use.
template <class Vector>
static inline Vector kept(Vector v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__x86_64__)
  asm("" : "+x"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#endif
  return v;
}

static inline Reg& reg(float* p) { return *reinterpret_cast<Reg*>(p); }
static inline const Reg& reg(const float* p) { return *reinterpret_cast<const Reg*>(p); }

// a * b + c, with one rounding where the machine can. Explicit, since the compiler's choice would differ by loop.
static inline Floats fused(Floats a, Floats b, Floats c) {
#if CPU_WIDTH == 16
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif CPU_WIDTH == 8 && defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#endif
  for (int i = 0; i < kWidth; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}

// For registers a and b, in blocks of H lanes: `even` has each even block of a followed by b's; `odd` the odd blocks.
template <int H, size_t... I>
static inline Reg even(Reg a, Reg b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, (I & H ? static_cast<int>(I) - H + kWidth : static_cast<int>(I))...);
}
template <int H, size_t... I>
static inline Reg odd(Reg a, Reg b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, (I & H ? static_cast<int>(I) + kWidth : static_cast<int>(I) + H)...);
}
using Lanes = std::make_index_sequence<kWidth>;

// Sums lanes of N registers (N and First are powers of two). Lane i of the result is a part of the sum of
// a[i / First % N]. With First = 1 and N = kWidth it is the whole sum of a[i].
template <int N, int First = 1>
static inline Reg fold(Reg* a) {
  for (int i = 0; i < N; i += 2) a[i / 2] = even<First>(a[i], a[i + 1], Lanes()) + odd<First>(a[i], a[i + 1], Lanes());
  if constexpr (N > 2)
    return fold<N / 2, 2 * First>(a);
  else
    return a[0];
}
