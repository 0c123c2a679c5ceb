// Matmul, norm, rotary positions and gate on CPU in float32, called by XLA through its foreign function interface.

#include "cpu_filter.h"
#include "cpu_kernels.h"

#include <cmath>
#include <cstring>
#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

constexpr int64_t kMany = 40;  // from this number of rows on, transposing a panel pays

// y = x w^T for the first `count` rows of x [tokens, in], and w [out, in]. Other rows of y are not written.
static void matmul(const Call& call) {
  const Array &x = call.argument(0), &w = call.argument(1);
  const int64_t tokens = call.leading(2, x.dims[0]), in = x.dims[1], out = w.dims[0];
  if (tokens <= 0) return;
  const float *xs = data<float>(x), *ws = data<float>(w);
  float* ys = data<float>(call.result());
  parallel_for(call, (out + kPiece - 1) / kPiece, [=](int64_t piece) {
    const int64_t n = piece * kPiece;
    multiply_rows(xs, ws + n * in, ys + n, tokens, std::min(kPiece, out - n), in, in, out, kMany);
  });
}
DEFINE_HANDLER(Matmul, matmul, kF32, kF32, kS32)

// Runs f(token) for the tokens of x [tokens, ...] that matter, in parallel. `count`: the argument that says how many.
template <class F>
static void for_tokens(const Call& call, const Array& x, int64_t count, F f) {
  const int64_t tokens = call.leading(count, x.dims[0]);
  const int64_t size = std::max<int64_t>(1, (1 << 13) * x.dims[0] / std::max<int64_t>(1, element_count(x)));
  parallel_for(call, (tokens + size - 1) / size, [=](int64_t piece) {
    for (int64_t t = piece * size; t < std::min(tokens, (piece + 1) * size); t++) f(t);
  });
}

// y = x / sqrt(mean(x^2) + eps) * scale [size].
static void norm(const float* x, const float* scale, float eps, int64_t size, float* y) {
  Vec squares = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) squares += at(x + i) * at(x + i);
  float total = sum(squares);
  for (; i < size; i++) total += x[i] * x[i];
  const float factor = 1 / std::sqrt(total / size + eps);
  for (i = 0; i < size; i++) y[i] = x[i] * factor * scale[i];
}

// Norms each vector of x [tokens, .., size].
static void rms_norm(const Call& call) {
  const Array &x = call.argument(0), &scale = call.argument(1);
  const int64_t size = scale.dims[0], rows = element_count(x) / size / x.dims[0];
  const float *xs = data<float>(x), *scales = data<float>(scale), eps = call.attribute<float>("eps");
  float* ys = data<float>(call.result());
  for_tokens(call, x, 2, [=](int64_t token) {
    for (int64_t row = token * rows; row < (token + 1) * rows; row++)
      norm(xs + row * size, scales, eps, size, ys + row * size);
  });
}
DEFINE_HANDLER(RmsNorm, rms_norm, kF32, kF32, kS32)

// Computes x + y [tokens, size], and its norm. y has a bias [size], or an empty array.
static void add_norm(const Call& call) {
  const Array &x = call.argument(0), &bias = call.argument(2);
  const int64_t size = x.dims[1];
  const float *xs = data<float>(x), *ys = data<float>(call.argument(1)), *scales = data<float>(call.argument(3));
  const float *biases = element_count(bias) ? data<float>(bias) : nullptr, eps = call.attribute<float>("eps");
  float *totals = data<float>(call.result(0)), *normed = data<float>(call.result(1));
  for_tokens(call, x, 4, [=](int64_t token) {
    const int64_t row = token * size;
    for (int64_t i = 0; i < size; i++) totals[row + i] = xs[row + i] + (biases ? ys[row + i] + biases[i] : ys[row + i]);
    norm(totals + row, scales, eps, size, normed + row);
  });
}
DEFINE_HANDLER(AddNorm, add_norm, kF32, kF32, kF32, kF32, kS32)

// y = (a cos - b sin, b cos + a sin) for the halves a and b of each vector of x [tokens, .., dim]; cos and sin are
// [tokens, dim / 2].
static void rope(const Call& call) {
  const Array &x = call.argument(0), &angles = call.argument(1);
  const int64_t half = angles.dims[1], rows = element_count(x) / (2 * half) / x.dims[0];
  const float *xs = data<float>(x), *cosines = data<float>(angles), *sines = data<float>(call.argument(2));
  float* ys = data<float>(call.result());
  for_tokens(call, x, 3, [=](int64_t token) {
    const float *cos = cosines + token * half, *sin = sines + token * half;
    for (int64_t row = token * rows; row < (token + 1) * rows; row++) {
      const float *a = xs + 2 * row * half, *b = a + half;
      float* y = ys + 2 * row * half;
      for (int64_t i = 0; i < half; i++) y[i] = a[i] * cos[i] - b[i] * sin[i];
      for (int64_t i = 0; i < half; i++) y[half + i] = b[i] * cos[i] + a[i] * sin[i];
    }
  });
}
DEFINE_HANDLER(Rope, rope, kF32, kF32, kF32, kS32)

// y = a / (1 + exp(-a)) * b for the pairs (a, b) of x [tokens, size, 2].
static void silu_gate(const Call& call) {
  const Array& x = call.argument(0);
  const int64_t size = x.dims[1];
  const float* xs = data<float>(x);
  float* ys = data<float>(call.result());
  for_tokens(call, x, 1, [=](int64_t token) {
    const auto gated = [](const float* from) {
      const Vec low = at(from), high = at(from + kLanes);
      const Vec a = __builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14);
      const Vec e = exponential(a > 0 ? -a : a);
      return (a > 0 ? a : a * e) / (1 + e) * __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15);
    };
    const float* from = xs + 2 * token * size;
    float* y = ys + token * size;
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) at(y + i) = gated(from + 2 * i);
    if (i < size) {
      float last[2 * kLanes] = {};
      std::copy(from + 2 * i, from + 2 * size, last);
      const Vec some = gated(last);
      for (int64_t j = i; j < size; j++) y[j] = some[j - i];
    }
  });
}
DEFINE_HANDLER(SiluGate, silu_gate, kF32, kS32)

// Index of the first largest number in each of the first `count` rows of x [rows, size]; 0 for other rows.
static void arg_max(const Call& call) {
  const Array& x = call.argument(0);
  const int64_t rows = call.leading(1, x.dims[0]), size = x.dims[1];
  const float* xs = data<float>(x);
  int32_t* places = data<int32_t>(call.result());
  std::fill_n(places, x.dims[0], 0);
  parallel_for(call, rows, [=](int64_t row) {
    constexpr int64_t kPiece = 1024;  // the largest number of a piece is found first, then its index
    const float* from = xs + row * size;
    float top = from[0];
    int64_t best = 0;
    for (int64_t first = 0; first < size; first += kPiece) {
      const int64_t end = std::min(size, first + kPiece);
      int64_t i = first;
      Vec tops = Vec{} + top;
      for (; i + kLanes <= end; i += kLanes) tops = at(from + i) > tops ? at(from + i) : tops;
      float highest = top;
      for (int j = 0; j < kLanes; j++) highest = std::max(highest, tops[j]);
      for (; i < end; i++) highest = std::max(highest, from[i]);
      if (highest > top) top = highest, best = std::find(from + first, from + end, highest) - from;
    }
    places[row] = best;
  });
}
DEFINE_HANDLER(ArgMax, arg_max, kF32, kS32)

// y = x - log(sum(exp(x))) for each of the first `count` rows of x [rows, size]. Zeros in other rows.
static void log_softmax(const Call& call) {
  const Array& x = call.argument(0);
  const int64_t rows = call.leading(1, x.dims[0]), size = x.dims[1];
  const float* xs = data<float>(x);
  float* ys = data<float>(call.result());
  std::fill(ys + rows * size, ys + x.dims[0] * size, 0.f);
  parallel_for(call, rows, [=](int64_t row) {
    constexpr int64_t kPiece = 1024;  // sums of pieces are added in double
    const float* from = xs + row * size;
    float* to = ys + row * size;
    const float top = *std::max_element(from, from + size);
    double total = 0;
    for (int64_t first = 0; first < size; first += kPiece) {
      const int64_t end = std::min(size, first + kPiece);
      Vec sums = {};
      int64_t i = first;
      for (; i + kLanes <= end; i += kLanes) sums += exponential(at(from + i) - top);
      if (i < end) {
        float last[kLanes];
        std::fill(std::copy(from + i, from + end, last), last + kLanes, -INFINITY);
        const Vec some = exponential(at(last) - top);
        for (int j = 0; j < end - i; j++) sums[j] += some[j];
      }
      total += sum(sums);
    }
    const float log = std::log(total);
    for (int64_t i = 0; i < size; i++) to[i] = from[i] - top - log;
  });
}
DEFINE_HANDLER(LogSoftmax, log_softmax, kF32, kS32)

// Filters the first `count` rows of x [rows, size] by top_k, top_p and min_p [rows]. Other rows are copied.
static void filter(const Call& call) {
  const Array& x = call.argument(0);
  const int64_t rows = call.leading(4, x.dims[0]), size = x.dims[1];
  const float *xs = data<float>(x), excluded = call.attribute<float>("excluded");
  const int32_t* top_k = data<int32_t>(call.argument(1));
  const float *top_p = data<float>(call.argument(2)), *min_p = data<float>(call.argument(3));
  float* ys = data<float>(call.result());
  std::copy(xs + rows * size, xs + x.dims[0] * size, ys + rows * size);
  parallel_for(call, rows, [=](int64_t row) {
    filter_row(xs + row * size, size, top_k[row], top_p[row], min_p[row], excluded, ys + row * size);
  });
}
DEFINE_HANDLER(Filter, filter, kF32, kS32, kF32, kF32, kS32)

// Writes nothing, so that the memory of a large result stays reserved by the system but not provided yet. With
// `large_pages` the system is asked for pages of 2 MiB.
static void untouched(const Call& call) {
#ifdef __linux__
  if (!call.attribute<bool>("large_pages")) return;
  constexpr uintptr_t kPage = 1 << 21;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data<char>(call.result()));
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  const uintptr_t last = (begin + call.attribute<int64_t>("bytes")) / kPage * kPage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}
DEFINE_HANDLER(Untouched, untouched)

// Writes zeros such that the system provides memory on the first write: whole pages are returned to the system, which
// provides zeros when they are used.
static void zeros(const Call& call) {
  char *begin = data<char>(call.result()), *end = begin + call.attribute<int64_t>("bytes"), *rest = begin;
#ifdef __linux__
  const uintptr_t page = sysconf(_SC_PAGESIZE);
  char* first = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(begin) + page - 1) / page * page);
  char* last = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(end) / page * page);
  if (first < last && madvise(first, last - first, MADV_DONTNEED) == 0) {
    std::memset(begin, 0, first - begin);
    rest = last;
  }
#endif
  std::memset(rest, 0, end - rest);
}
DEFINE_HANDLER(Zeros, zeros)
