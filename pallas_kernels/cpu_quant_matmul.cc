// Products with quantized weights on CPU, called by XLA through its foreign function interface. x and sums are float32.
//
// A few rows of x are multiplied with codes that become floats in registers. More rows share a few dequantized rows of
// the weight, which stay in the cache meanwhile. In both cases memory delivers only codes, once.

#include <cstring>

#include "cpu_kernels.h"

typedef int32_t Int __attribute__((vector_size(4 * kLanes)));

// Formats of codes. Each loads kLanes consecutive codes as floats.

struct Int8 {
  static constexpr int64_t kBits = 8;
  static Int widen(const uint8_t* from) {
    const int8_t* c = reinterpret_cast<const int8_t*>(from);
    return Int{c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]};
  }
  static Vec load(const uint8_t* from) { return __builtin_convertvector(widen(from), Vec); }
};

struct Int4 {  // two in a byte, the low half first
  static constexpr int64_t kBits = 4;
  static Vec load(const uint8_t* from) {
    int32_t all;
    std::memcpy(&all, from, sizeof all);
    return __builtin_convertvector((all - Int{}) << Int{28, 24, 20, 16, 12, 8, 4, 0} >> 28, Vec);
  }
};

// float8_e4m3fn: exponents have a bias of 7; exponent 0 means multiples of 2^-9. The conversion avoids subnormal
// floats, which XLA's threads flush to zero. NaNs become +-480.
struct Float8 {
  static constexpr int64_t kBits = 8;
  static Vec load(const uint8_t* from) {
    const Int code = Int8::widen(from);
    Vec size = (Vec)(((code & 0x7f) << 20) + (120 << 23));
    size = (code & 0x78) == 0 ? 2 * size - 0x1p-6f : size;
    return (Vec)((Int)size | (code & INT32_MIN));
  }
};

struct Weight {
  const uint8_t* codes;  // [out, in]; rows are whole bytes
  int64_t out, in, row_bytes;
  int64_t block, group, groups;
  const uint8_t *scale, *bias;  // [out / block, groups] of `type`; null: no bias, or no zero points
  const int8_t* zero;
  XLA_FFI_DataType type;
};

static inline float as_float(int32_t bits) { return __builtin_bit_cast(float, bits); }

// Converts `count` numbers of a 16-bit or 32-bit type to float32, starting with number `first`.
static void widen(const uint8_t* from, XLA_FFI_DataType type, int64_t first, int64_t count, float* __restrict to) {
  const uint16_t* half = reinterpret_cast<const uint16_t*>(from) + first;
  if (type == XLA_FFI_DataType_F32)
    std::memcpy(to, from + first * 4, count * 4);
  else if (type == XLA_FFI_DataType_BF16)
    for (int64_t i = 0; i < count; i++) to[i] = as_float(half[i] << 16);
  else
    for (int64_t i = 0; i < count; i++) {
      const int32_t size = half[i] & 0x7fff, subnormal = (size - 0x400) >> 31;  // 0 or -1
      const float value = as_float((size << 13) + ((112 - subnormal) << 23)) - as_float(subnormal & 113 << 23);
      to[i] = half[i] >> 15 ? -value : value;
    }
}

// N rows of a weight; rows beyond the last repeat it. A value is code * scale + shift.
template <int N>
struct Rows {
  const uint8_t* codes[N];
  const float *scale[N], *shift[N];  // for each group

  Rows(const Weight& w, int64_t first) {
    static thread_local std::vector<float> numbers;
    numbers.resize(2 * N * w.groups);
    float* to = numbers.data();
    for (int n = 0; n < N; n++, to += 2 * w.groups) {
      const int64_t row = std::min(first + n, w.out - 1), at = row / w.block * w.groups;
      float* shifts = to + w.groups;
      codes[n] = w.codes + row * w.row_bytes, scale[n] = to, shift[n] = shifts;
      widen(w.scale, w.type, at, w.groups, to);
      std::fill_n(shifts, w.groups, 0.f);
      if (w.bias) widen(w.bias, w.type, at, w.groups, shifts);
      if (w.zero)
        for (int64_t g = 0; g < w.groups; g++) shifts[g] -= w.zero[at + g] * to[g];
    }
  }
};

// Loads the last inputs of a row, fewer than kLanes, followed by zeros.
template <class Codes>
static Vec load_last(const uint8_t* codes, int64_t count) {
  uint8_t padded[kLanes] = {};
  std::memcpy(padded, codes, count * Codes::kBits / 8);
  return Codes::load(padded);
}

// y[m, n] = x[m] . w[n] for M rows x, `in` apart, and N of the kWide rows w, of which `wide` exist, from `first` on. A
// single scale per row multiplies the sum. Prefetches the codes that follow.
constexpr int kWide = 4;
template <class Codes, bool kGrouped, int M, int N>
static void tile(const float* x, int64_t in, const Weight& w, const Rows<kWide>& rows, int first, float* y,
                 int64_t wide) {
  const int64_t span = kGrouped ? w.group : 64 * 8 / Codes::kBits;
  Vec sums[N][M];
  for (auto& some : sums)
    for (Vec& sum : some) sum = Vec{};
  for (int64_t k = 0, g = 0; k < w.in; g++) {
    auto add = [&](auto load) {
      for (int n = 0; n < N; n++) {
        Vec right = load(rows.codes[first + n] + k * Codes::kBits / 8);
        if (kGrouped) right = right * rows.scale[first + n][g] + rows.shift[first + n][g];
        hold(right);
        for (int m = 0; m < M; m++) sums[n][m] += at(x + m * in + k) * right;
      }
    };
    const int64_t end = std::min(w.in, k + span);
    for (int n = 0; n < N; n++)
      for (int64_t byte = k * Codes::kBits / 8; byte < end * Codes::kBits / 8; byte += 64)
        __builtin_prefetch(rows.codes[first + n] + kWide * w.row_bytes + byte);
    for (; k + kLanes <= end; k += kLanes) add(Codes::load);
    if (k < end) {
      add([&](const uint8_t* codes) { return load_last<Codes>(codes, end - k); });
      k = end;
    }
  }
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N && first + n < wide; n++)
      y[m * w.out + first + n] = sum(sums[n][m]) * (kGrouped ? 1 : rows.scale[first + n][0]);
}

// `tile` for any number of rows x, and all kWide rows w.
template <class Codes, bool kGrouped>
static void few_rows(const float* x, int64_t tokens, int64_t in, const Weight& w, int64_t first, float* y,
                     int64_t wide) {
  const Rows<kWide> rows(w, first);
  constexpr int kTall = 4;
  for (int64_t passes = (tokens + kTall - 1) / kTall; passes; passes--) {
    const int64_t height = tokens / passes;
    if (height == 1) tile<Codes, kGrouped, 1, 4>(x, in, w, rows, 0, y, wide);
    if (height == 2) tile<Codes, kGrouped, 2, 4>(x, in, w, rows, 0, y, wide);
    for (int n = 0; n < kWide; n += 2) {
      if (height == 3) tile<Codes, kGrouped, 3, 2>(x, in, w, rows, n, y, wide);
      if (height == 4) tile<Codes, kGrouped, 4, 2>(x, in, w, rows, n, y, wide);
    }
    tokens -= height, x += height * in, y += height * w.out;
  }
}

// Dequantizes kPanel rows to float32, `row` apart.
template <class Codes>
static void dequantize(const Weight& w, int64_t first, float* to, int64_t row) {
  const Rows<kPanel> rows(w, first);
  for (int n = 0; n < kPanel; n++, to += row)
    for (int64_t k = 0, g = 0; k < w.in; g++) {
      const float scale = rows.scale[n][g], shift = rows.shift[n][g];
      const int64_t end = std::min(w.in, k + w.group);
      for (; k + kLanes <= end; k += kLanes)
        at(to + k) = Codes::load(rows.codes[n] + k * Codes::kBits / 8) * scale + shift;
      if (k < end) at(to + k) = load_last<Codes>(rows.codes[n] + k * Codes::kBits / 8, end - k) * scale + shift;
      k = end;
    }
}

template <class Codes>
static void product(const Call& call, const float* x, int64_t tokens, int64_t in, const Weight& w, float* y) {
  constexpr int64_t kFew = 8;
  const int64_t row = in + 2 * kLanes;  // not a power of two, so that dequantized rows do not compete for one cache set
  parallel_for(call, (w.out + kPiece - 1) / kPiece, [=](int64_t piece) {
    const int64_t first = piece * kPiece, end = std::min(w.out, first + kPiece);
    if (tokens <= kFew) {
      const auto few = w.groups > 1 || w.zero || w.bias ? few_rows<Codes, true> : few_rows<Codes, false>;
      for (int64_t n = first; n < end; n += kWide)
        few(x, tokens, in, w, n, y + n, std::min<int64_t>(kWide, end - n));
      return;
    }
    static thread_local std::vector<float> rows;
    rows.resize(row * kPanel);
    for (int64_t n = first; n < end; n += kPanel) {
      dequantize<Codes>(w, n, rows.data(), row);
      multiply_rows(x, rows.data(), y + n, tokens, std::min<int64_t>(kPanel, end - n), in, row, w.out, 0);
    }
  });
}

// A weight [.., out, in] with blocks of block x group: number `expert` of a stack, or a single one. Arguments from
// `first` on: codes, scale, zero, bias. Zero and bias may be empty arrays.
static Weight weight_of(const Call& call, int64_t first, int64_t expert) {
  const Array &codes = call.argument(first), &scale = call.argument(first + 1);
  const auto last = [](const Array& a, int64_t i) { return a.dims[a.rank - i]; };
  Weight w{};
  w.out = last(codes, 2), w.in = last(codes, 1), w.groups = last(scale, 1);
  w.row_bytes = codes.dtype == XLA_FFI_DataType_S4 ? w.in / 2 : w.in;
  w.codes = data<const uint8_t>(codes) + expert * w.out * w.row_bytes;
  w.block = call.attribute<int64_t>("block"), w.group = w.groups > 1 ? call.attribute<int64_t>("group") : INT64_MAX;
  w.type = scale.dtype;
  const int64_t numbers = expert * last(scale, 2) * w.groups, width = scale.dtype == XLA_FFI_DataType_F32 ? 4 : 2;
  const auto bytes = [numbers](const Array& a, int64_t width) {
    return element_count(a) ? data<const uint8_t>(a) + numbers * width : nullptr;
  };
  w.scale = bytes(scale, width), w.zero = reinterpret_cast<const int8_t*>(bytes(call.argument(first + 2), 1));
  w.bias = bytes(call.argument(first + 3), width);
  return w;
}

static void multiply(const Call& call, const Array& codes, const float* x, int64_t tokens, int64_t in, const Weight& w,
                     float* y) {
  const auto by_type = codes.dtype == XLA_FFI_DataType_S4   ? product<Int4>
                       : codes.dtype == XLA_FFI_DataType_S8 ? product<Int8>
                                                            : product<Float8>;
  by_type(call, x, tokens, in, w, y);
}

// y = x w^T for the first `count` rows of x [tokens, in]. Other rows of y are not written. x has zeros after its
// inputs, to a multiple of kLanes.
static void quant_matmul(const Call& call) {
  const Array& x = call.argument(0);
  const int64_t tokens = call.leading(5, x.dims[0]);
  if (tokens <= 0) return;
  multiply(call, call.argument(1), data<float>(x), tokens, x.dims[1], weight_of(call, 1, 0), data<float>(call.result()));
}
DEFINE_HANDLER(QuantMatmul, quant_matmul, kF32, kAny, kAny, kS8, kAny, kS32)

// The products with a stack of weights [experts, out, in]. Expert e has the next sizes[e] rows of x. Rows of y beyond
// all experts' rows become zeros. Weights of experts without rows are not read.
static void grouped_quant_matmul(const Call& call) {
  const Array &x = call.argument(0), &sizes = call.argument(5);
  const int32_t* rows = data<int32_t>(sizes);
  const int64_t in = x.dims[1], out = call.result().dims[1];
  if (kChecked) check_sizes(rows, sizes.dims[0], x.dims[0]);
  float* y = data<float>(call.result());
  int64_t first = 0;
  for (int64_t e = 0; e < sizes.dims[0]; first += rows[e++])
    if (rows[e] > 0)
      multiply(call, call.argument(1), data<float>(x) + first * in, rows[e], in, weight_of(call, 1, e), y + first * out);
  std::fill(y + first * out, y + x.dims[0] * out, 0.f);
}
DEFINE_HANDLER(GroupedQuantMatmul, grouped_quant_matmul, kF32, kAny, kAny, kS8, kAny, kS32)

// Copies the bytes [...]. The result has int4 numbers, two in each byte, which is their form in memory already.
constexpr int64_t kCopy = 1 << 18;  // bytes of a thread's piece

static void int4_of_bytes(const Call& call) {
  const Array& bytes = call.argument(0);
  const uint8_t* from = data<const uint8_t>(bytes);
  uint8_t* to = data<uint8_t>(call.result());
  const int64_t size = element_count(bytes);
  parallel_for(call, (size + kCopy - 1) / kCopy, [=](int64_t i) {
    std::memcpy(to + i * kCopy, from + i * kCopy, std::min(kCopy, size - i * kCopy));
  });
}
DEFINE_HANDLER(Int4OfBytes, int4_of_bytes, XLA_FFI_DataType_U8)
