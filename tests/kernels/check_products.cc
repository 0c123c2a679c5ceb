// Compares products of integers with panels of every type with sums in double, and prints the largest error, relative to
// the sum of the terms' sizes. For processors that are only emulated, which cannot run JAX.

#include <cstdio>
#include <random>

#include "cpu_panel_product.h"

constexpr int64_t kOut = 64, kIn = 512;

template <class R>
static double worst_error() {
  const int64_t blocks_of = R::kBlocks ? R::kBlocks : kIn / kBlock, bytes = panel_bytes(R::kType, kIn, blocks_of);
  const int64_t count = kOut / kPanelRows, records = kIn / kBlock / blocks_of;
  std::mt19937 random(1);
  std::vector<uint8_t> memory(bytes * count + 2 * kAhead + 64);  // what lies behind is prefetched
  uint8_t* data = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
  std::vector<int32_t> table;
  for (int64_t i = 0; i < bytes * count; i++) data[i] = random();
  for (int64_t p = 0; p < count; p++) {
    for (int64_t r = 0; r < records; r++) {  // moderate scales
      uint8_t* to = data + p * bytes + r * R::bytes(blocks_of);
      float* floats = reinterpret_cast<float*>(to);
      uint16_t* halves = reinterpret_cast<uint16_t*>(to);
      if (R::kFloat4) {
        for (int i = 0; i < R::kCodes; i++) to[i] = R::kType == kMxfp4 ? 118 + random() % 12 : 1 + random() % 95;
      } else if (R::kBlocks) {
        for (int i = 0; i < (R::kBlocks == 2 ? R::kCodes : 64) / 2; i++) halves[i] = 0x2c00 + random() % 256;
      } else {
        for (int i = 0; i < 2 * kPanelRows; i++) floats[i] = random() % 1000 * 1e-4f;
      }
    }
    table.insert(table.end(), {static_cast<int32_t>(p * bytes / 64), R::kType, static_cast<int32_t>(blocks_of)});
    float* gains = reinterpret_cast<float*>(data + p * bytes + panel_bytes(kNvfp4, kIn, 0)) - kPanelRows;
    if (R::kType == kNvfp4) std::fill_n(gains, kPanelRows, 1.f);
  }
  alignas(Panels) uint8_t place[sizeof(Panels)];
  Panels& w = *reinterpret_cast<Panels*>(place);
  w.data = data, w.table = table.data(), w.out = kOut, w.in = kIn;
  double worst = 0;
  for (int64_t tokens : {1, 2, 3, 4, 5, 9, 13}) {
    std::vector<float> x(tokens * kIn), y(tokens * kOut);
    for (float& value : x) value = (static_cast<int>(random() % 2001) - 1000) * 1e-3f;
    Rounded rounded;
    rounded.reserve(tokens, kIn, false, true);
    for (int64_t i = 0; i < tokens * kIn / kBlock; i++)
      rounded.round_block(x.data() + i * kBlock, kBlock, i / rounded.blocks, i % rounded.blocks);
    Product{x.data(), tokens, w, rounded, 0, kInteger, y.data()}.run_all(0, count);
    for (int64_t i = 0; i < tokens * kOut; i++) {
      const int64_t token = i / kOut, panel = i % kOut / kPanelRows, row = i % kPanelRows;
      double sum = 0, size = 0;
      for (int64_t k = 0; k < kIn; k += 4) {
        const int64_t block = k / kBlock, b = block % blocks_of, q = k % kBlock / 4;
        const uint8_t* record = data + panel * bytes + block / blocks_of * R::bytes(blocks_of);
        const Bytes codes = R::codes(record, blocks_of, b, q, row / kWidth);
        Floats scale, shift;
        R::scales(record, R::kBlocks ? b * (kBlock / R::kSub) + q * 4 / R::kSub : 0, row / kWidth, scale, shift);
        const int32_t four = rounded.codes[token * rounded.inputs / 4 + block * 8 + q];
        for (int j = 0; j < 4; j++) {
          const double weight = double(codes[row % kWidth * 4 + j]) * scale[row % kWidth] + shift[row % kWidth];
          const double term = weight * static_cast<int8_t>(four >> 8 * j) * rounded.scale[token * rounded.blocks + block];
          sum += term, size += std::abs(term);
        }
      }
      const double error = std::abs(sum - y[i]) / size;
      worst = error > worst || error != error ? error : worst;  // a NaN stays
    }
  }
  return worst;
}

int main() {
  for (int32_t type = kQ8_0; type <= kIq4Xs; type++)
    with_record(type, [&](auto record) { std::printf("%d %g\n", type, worst_error<decltype(record)>()); });
}
