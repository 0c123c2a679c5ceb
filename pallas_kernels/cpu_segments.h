// Attention in both directions within segments, for the encoders of pictures. Included by cpu_attention.cc, whose
// products and softmax it uses.
//
// A tile of queries of one head loops over the blocks of keys that may have a row of the same segment. Keys are
// transposed and values copied first: a head's rows are far apart, often at multiples of 4 KiB, which few lines of the
// first-level cache hold.

#pragma once

constexpr int64_t kSegmentRows = 128;  // queries of a tile

struct Segments {
  const float *q, *k, *v;  // [rows, heads, dim]
  float* out;
  const int32_t* segment;  // [rows]
  int64_t rows, heads, dim, width;
  float scale;

  int64_t at(int64_t row, int64_t head) const { return (row * heads + head) * dim; }
};

// The lowest and the highest segment of rows, without padding; and whether all rows have the same.
struct Span {
  int32_t lowest = INT32_MAX, highest = -1;
  bool one = false;

  Span() {}
  Span(const int32_t* segment, int64_t count) {
    one = segment[0] >= 0;
    for (int64_t i = 0; i < count; i++) {
      one = one && segment[i] == segment[0];
      if (segment[i] >= 0) lowest = std::min(lowest, segment[i]), highest = std::max(highest, segment[i]);
    }
  }
  bool meets(const Span& other) const { return lowest <= other.highest && other.lowest <= highest; }
};

// Computes queries [begin, begin + count) of a head. `spans`: of the blocks of keys.
static void run_segments(const Segments& p, const std::vector<Span>& spans, int64_t head, int64_t begin, int64_t count) {
  const Span own(p.segment + begin, count);
  if (own.highest < 0) return;  // padding
  const int64_t width = p.width;
  static thread_local std::vector<float> floats;
  floats.assign(count * (2 * width + kBlock + 2) + 2 * kBlock * width, 0.f);
  float *in = floats.data(), *out = in + count * width, *scores = out + count * width, *peaks = scores + count * kBlock;
  float *totals = peaks + count, *panel = totals + count, *values = panel + kBlock * width;
  std::fill_n(peaks, count, kMasked);
  for (int64_t m = 0; m < count; m++)
    for (int64_t d = 0; d < p.dim; d += kWidth)
      reg(in + m * width + d) = load_some<Float32>(p.q + p.at(begin + m, head) + d, p.dim - d) * p.scale;

  static thread_local std::vector<const float*> rows;
  rows.resize(std::max(width, kBlock) + kAhead);
  const auto multiply = [&](const float* left, int64_t left_row, const float* right, int64_t right_row, int64_t inner,
                            int64_t columns, float* to, int64_t to_row) {
    for (int64_t i = 0; i < inner + kAhead; i++) rows[i] = right + std::min(i, inner - 1) * right_row;
    for (int64_t m = 0; m < count; m += kTall)
      mix_strip<Float32>(std::min<int64_t>(kTall, count - m), left + m * left_row, left_row, rows.data(), inner, columns,
                         to + m * to_row, to_row);
  };

  for (size_t block = 0; block < spans.size(); block++) {
    if (!own.meets(spans[block])) continue;
    const int64_t first = block * kBlock, keys = std::min(kBlock, p.rows - first), padded = round_up(keys, kWidth);
    const float* addresses[kBlock];
    int32_t theirs[kBlock];
    for (int64_t s = 0; s < padded; s++) {
      addresses[s] = p.k + p.at(first + std::min(s, keys - 1), head);
      theirs[s] = s < keys ? p.segment[first + s] : -1;
    }
    pack_keys<Float32>(addresses, padded, p.dim, width, panel);
    for (int64_t s = 0; s < keys; s++)  // a share of 0 of what is no number would be no number
      for (int64_t d = 0; d < width; d += kWidth)
        reg(values + s * width + d) =
            theirs[s] < 0 ? Reg{} : load_some<Float32>(p.v + p.at(first + s, head) + d, p.dim - d);

    std::fill_n(scores, count * kBlock, 0.f);
    for (int64_t s = 0; s < padded; s += kColumns)
      multiply(in, width, panel + s * width, kColumns, width, std::min(kColumns, padded - s), scores + s, kBlock);
    if (!own.one || !spans[block].one)
      for (int64_t m = 0; m < count; m++)
        for (int64_t s = 0; s < padded; s += kWidth) {
          Reg& x = reg(scores + m * kBlock + s);
          x = load<Ints>(theirs + s) == p.segment[begin + m] ? x : Reg{} + kMasked;
        }
    for (int64_t m = 0; m < count; m++) {
      const float keep = take_in(scores + m * kBlock, 0, keys, padded, {}, peaks[m], totals[m]);
      if (keep != 1)
        for (int64_t d = 0; d < width; d += kWidth) reg(out + m * width + d) *= keep;
    }
    multiply(scores, kBlock, values, width, keys, width, out, width);
  }
  for (int64_t m = 0; m < count; m++)
    for (int64_t d = 0; d < p.dim; d += kWidth)
      store_some<Float32>(reg(out + m * width + d) / totals[m], p.out + p.at(begin + m, head) + d, p.dim - d);
}

// Arguments: q, k, v [rows, heads, dim]; the segments [rows]. See segment_attention/reference.py.
static void segment_attention(const Call& call) {
  const Array& q = call.argument(0);
  Segments p{data<float>(q), data<float>(call.argument(1)), data<float>(call.argument(2)), data<float>(call.result())};
  p.segment = data<int32_t>(call.argument(3)), p.rows = q.dims[0], p.heads = q.dims[1], p.dim = q.dims[2];
  p.width = round_up(p.dim, kWidth), p.scale = call.attribute<float>("scale");
  std::vector<Span> spans;
  for (int64_t first = 0; first < p.rows; first += kBlock)
    spans.emplace_back(p.segment + first, std::min(kBlock, p.rows - first));
  const int64_t tiles = (p.rows + kSegmentRows - 1) / kSegmentRows;
  parallel_for(call, tiles * p.heads, [&](int64_t i) {
    const int64_t begin = i % tiles * kSegmentRows;
    run_segments(p, spans, i / tiles, begin, std::min(kSegmentRows, p.rows - begin));
  });
}
DEFINE_HANDLER(SegmentAttention, segment_attention, kF32, kF32, kF32, kS32)
