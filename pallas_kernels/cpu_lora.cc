// What LoRA adapters add to a product, on CPU, called by XLA through its foreign function interface: for each token,
// y += (x A^T) B with the matrices of its own adapter. x and y are float32, the matrices float32 or bfloat16.
//
// Tokens are sorted by adapter, so that memory delivers each matrix once. Parts that an adapter does not change, and rows
// of the matrices beyond its rank, are not read.

#include <vector>

#include "cpu_threads.h"
#include "cpu_vectors.h"

typedef uint16_t Shorts __attribute__((vector_size(2 * kWidth)));

// Formats of the matrices' numbers.
struct Float32 {
  typedef float Number;
  static inline Floats widen(const float* from) { return load<Floats>(from); }
  static inline float one(float x) { return x; }
};
struct Bfloat16 {
  typedef uint16_t Number;
  static inline Floats widen(const uint16_t* from) {
    return (Floats)(__builtin_convertvector(load<Shorts>(from), Ints) << 16);
  }
  static inline float one(uint16_t x) { return __builtin_bit_cast(float, static_cast<uint32_t>(x) << 16); }
};

static inline void store(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }
static inline float total(Floats v) {
  float sums[kWidth];
  store(sums, v);
  for (int width = kWidth / 2; width; width /= 2)
    for (int i = 0; i < width; i++) sums[i] += sums[i + width];
  return sums[0];
}

constexpr int kTall = 4, kRows = 4;               // tokens and rows of A in a tile
constexpr int kColumns = kRegisters == 32 ? 4 : 2;  // vectors of outputs in a tile
constexpr int64_t kPiece = 512;                   // outputs of a piece of work
constexpr int64_t kWork = 1 << 15;                // multiplications for which another thread pays

struct Job {
  const float* x;
  float *y, *low;                   // low: [tokens, parts * rank], or where parts alternate [tokens, rank, 2]
  const int32_t *place, *ranks;
  int64_t in, out, places, parts, rank, stride;  // stride: ranks of an adapter
  bool alternate;                   // parts belong to outputs in turns of one
  int64_t width[3];
  std::vector<int32_t> order;       // tokens by adapter
};

// Tokens order[first] .. order[first + count - 1], which have the same adapter, and a piece of their work.
struct Piece {
  int64_t first, count, place, part, from, to;
};

// low = x . a for M tokens and kRows rows of a, of which `rows` exist; numbers of a token's are `step` apart.
template <class T, int M>
static void shrink_tile(const Job& job, const int32_t* tokens, const typename T::Number* a, int64_t rows, float* low,
                        int64_t row, int64_t step) {
  const float* x[M];
  const typename T::Number* w[kRows];
  for (int m = 0; m < M; m++) x[m] = job.x + tokens[m] * job.in;
  for (int n = 0; n < kRows; n++) w[n] = a + std::min<int64_t>(n, rows - 1) * job.in;
  Floats sums[M][kRows] = {};
  int64_t k = 0;
  for (; k + kWidth <= job.in; k += kWidth) {
    Floats left[M];
    for (int m = 0; m < M; m++) left[m] = load<Floats>(x[m] + k);
    for (int n = 0; n < kRows; n++) {
      const Floats right = T::widen(w[n] + k);
      for (int m = 0; m < M; m++) sums[m][n] += left[m] * right;
    }
  }
  for (int m = 0; m < M; m++)
    for (int n = 0; n < rows && n < kRows; n++) {
      float sum = total(sums[m][n]);
      for (int64_t i = k; i < job.in; i++) sum += x[m][i] * T::one(w[n][i]);
      low[m * row + n * step] = sum;
    }
}

// y[from .. to) += low . b for M tokens, with b [rank, out]. Where parts alternate, each pair of outputs has a pair of
// factors.
template <class T, int M, int C, bool kAlternate>
static int64_t expand_tile(const Job& job, const int32_t* tokens, const float* low, int64_t row,
                           const typename T::Number* b, int64_t rank, int64_t from, int64_t to) {
  for (; from + C * kWidth <= to; from += C * kWidth) {
    Floats sums[M][C];
    for (int m = 0; m < M; m++)
      for (int c = 0; c < C; c++) sums[m][c] = load<Floats>(job.y + tokens[m] * job.out + from + c * kWidth);
    for (int64_t r = 0; r < rank; r++) {
      Floats right[C];
      for (int c = 0; c < C; c++) right[c] = T::widen(b + r * job.out + from + c * kWidth);
      for (int m = 0; m < M; m++) {
        Floats left;
        if (kAlternate) {
          typedef double Doubles __attribute__((vector_size(4 * kWidth)));
          double pair;
          std::memcpy(&pair, low + m * row + 2 * r, sizeof pair);
          left = (Floats)(pair - Doubles{});
        } else {
          left = low[m * row + r] - Floats{};
        }
        for (int c = 0; c < C; c++) sums[m][c] += left * right[c];
      }
    }
    for (int m = 0; m < M; m++)
      for (int c = 0; c < C; c++) store(job.y + tokens[m] * job.out + from + c * kWidth, sums[m][c]);
  }
  return from;
}

template <class T, int M, bool kAlternate>
static void expand_tokens(const Job& job, const int32_t* tokens, const float* low, int64_t row,
                          const typename T::Number* b, int64_t rank, int64_t from, int64_t to) {
  from = expand_tile<T, M, kColumns, kAlternate>(job, tokens, low, row, b, rank, from, to);
  from = expand_tile<T, M, 1, kAlternate>(job, tokens, low, row, b, rank, from, to);
  for (; from < to; from++)
    for (int m = 0; m < M; m++) {
      float sum = job.y[tokens[m] * job.out + from];
      for (int64_t r = 0; r < rank; r++)
        sum += low[m * row + (kAlternate ? 2 * r + from % 2 : r)] * T::one(b[r * job.out + from]);
      job.y[tokens[m] * job.out + from] = sum;
    }
}

// Calls f(std::integral_constant<int, M>, first) for tiles of up to kTall of `count` tokens.
template <class F>
static void by_tile(int64_t count, F f) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) f(std::integral_constant<int, 4>(), i);
  if (count - i == 3) f(std::integral_constant<int, 3>(), i);
  if (count - i == 2) f(std::integral_constant<int, 2>(), i);
  if (count - i == 1) f(std::integral_constant<int, 1>(), i);
}

template <class F>
static void run_pieces(const Call& call, const std::vector<Piece>& pieces, int64_t work, F f) {
  const int64_t count = pieces.size(), turns = std::clamp<int64_t>(work / kWork, 1, std::min<int64_t>(16, count));
  parallel_for(call, turns, [&](int64_t turn) {
    for (int64_t i = turn * count / turns; i < (turn + 1) * count / turns; i++) f(pieces[i]);
  });
}

template <class T>
static void adapt(const Call& call, Job& job, const typename T::Number* a, const typename T::Number* b) {
  const int64_t tokens = job.order.size(), row = job.parts * job.rank;
  static thread_local std::vector<float> numbers;
  numbers.assign(tokens * row, 0.f);
  job.low = numbers.data();
  std::vector<Piece> shrinks, expands;
  int64_t shrinking = 0, expanding = 0;
  for (int64_t first = 0, end; first < tokens; first = end) {
    const int64_t place = job.place[job.order[first]];
    for (end = first + 1; end < tokens && job.place[job.order[end]] == place; end++);
    const int32_t* ranks = job.ranks + place * job.stride;
    int64_t highest = 0, begin = 0;
    for (int64_t p = 0; p < job.parts; p++) {
      for (int64_t r = 0; r < ranks[p]; r += kRows)
        shrinks.push_back({first, end - first, place, p, r, std::min<int64_t>(r + kRows, ranks[p])});
      shrinking += (end - first) * ranks[p] * job.in;
      highest = std::max<int64_t>(highest, ranks[p]);
    }
    const auto add = [&](int64_t part, int64_t rank, int64_t from, int64_t to) {
      for (int64_t n = from; rank && n < to; n += kPiece)
        expands.push_back({first, end - first, place, part, n, std::min(n + kPiece, to)});
      expanding += (end - first) * rank * (to - from);
    };
    if (job.parts == 1 || job.alternate) {
      add(0, highest, 0, job.out);
      continue;
    }
    while (begin < job.out)
      for (int64_t p = 0; p < job.parts; begin += job.width[p++]) add(p, ranks[p], begin, begin + job.width[p]);
  }
  const int64_t step = job.alternate ? job.parts : 1;
  run_pieces(call, shrinks, shrinking, [&](const Piece& piece) {
    const auto* rows = a + ((piece.place * job.parts + piece.part) * job.rank + piece.from) * job.in;
    float* low = job.low + piece.first * row + (job.alternate ? piece.part + 2 * piece.from : piece.part * job.rank + piece.from);
    by_tile(piece.count, [&](auto tall, int64_t i) {
      shrink_tile<T, decltype(tall)::value>(job, job.order.data() + piece.first + i, rows, piece.to - piece.from,
                                            low + i * row, row, step);
    });
  });
  run_pieces(call, expands, expanding, [&](const Piece& piece) {
    const int32_t* ranks = job.ranks + piece.place * job.stride;
    const auto* rows = b + piece.place * job.rank * job.out;
    const int64_t rank = job.alternate ? std::max(ranks[0], ranks[1]) : ranks[piece.part];
    const float* low = job.low + piece.first * row + (job.alternate ? 0 : piece.part * job.rank);
    by_tile(piece.count, [&](auto tall, int64_t i) {
      constexpr int M = decltype(tall)::value;
      const int32_t* some = job.order.data() + piece.first + i;
      const auto expand = job.alternate ? expand_tokens<T, M, true> : expand_tokens<T, M, false>;
      expand(job, some, low + i * row, row, rows, rank, piece.from, piece.to);
    });
  });
}

// y [tokens, out], which is also the result; x [tokens, in]; a [places, parts * rank, in]; b [places, rank, out]; the
// place of each token's adapter, or -1; ranks [places, parts or more]; the number of tokens that matter.
static void add_adapters(const Call& call) {
  const Array &x = call.argument(1), &a = call.argument(2), &b = call.argument(3), &ranks = call.argument(5);
  const int64_t tokens = std::min<int64_t>(x.dims[0], *data<int32_t>(call.argument(6)));
  Job job{};
  job.x = data<float>(x), job.y = data<float>(call.result()), job.place = data<int32_t>(call.argument(4));
  job.in = x.dims[1], job.out = b.dims[2], job.places = a.dims[0], job.rank = b.dims[1], job.stride = ranks.dims[1];
  job.parts = a.dims[1] / job.rank, job.ranks = data<int32_t>(ranks);
  job.width[0] = call.attribute<int64_t>("first"), job.width[1] = call.attribute<int64_t>("second");
  job.width[2] = call.attribute<int64_t>("third");
  job.alternate = job.parts == 2 && job.width[0] == 1 && job.width[1] == 1;
  for (int64_t t = 0; t < tokens; t++)
    if (job.place[t] >= 0 && job.place[t] < job.places) job.order.push_back(t);
  if (job.order.empty()) return;
  std::stable_sort(job.order.begin(), job.order.end(), [&](int32_t s, int32_t t) { return job.place[s] < job.place[t]; });
  if (a.dtype == XLA_FFI_DataType_BF16)
    adapt<Bfloat16>(call, job, data<uint16_t>(a), data<uint16_t>(b));
  else
    adapt<Float32>(call, job, data<float>(a), data<float>(b));
}
DEFINE_HANDLER(AddAdapters, add_adapters, kF32, kF32, kAny, kAny, kS32, kS32, kS32)
