// Products with weights in panels (cpu_panels.h), rows of such weights, and mixtures of experts, called by XLA through
// its foreign function interface. Results are float32.

#include "cpu_panel_experts.h"

// y = x w^T for the first `count` rows of x [tokens, in]. Other rows of y are not written.
static void panel_matmul(const Call& call) {
  const Array& x = call.argument(0);
  const int64_t tokens = call.leading(3, x.dims[0]);
  if (tokens <= 0) return;
  const Panels w(call, 1, call.attribute<int64_t>("out"), call.attribute<int64_t>("inputs"));
  multiply(call, w, tokens, call.attribute<int64_t>("arithmetic"),
           [](const Product& product, int64_t, int64_t, int64_t first, int64_t end) { product.run_all(first, end); });
}
DEFINE_HANDLER(PanelMatmul, panel_matmul, kF32, XLA_FFI_DataType_U8, kS32, kS32)

// y[i] = row ids[i] of the weight in float32. ids are clamped to its rows.
static void panel_rows(const Call& call) {
  const Array& ids = call.argument(0);
  const Panels w(call, 1, call.attribute<int64_t>("out"), call.attribute<int64_t>("inputs"));
  const int32_t* id = data<int32_t>(ids);
  float* y = data<float>(call.result());
  parallel_for(call, ids.dims[0], [=](int64_t i) {
    const int64_t row = std::clamp<int64_t>(id[i], 0, w.out - 1), panel = row / kPanelRows, lane = row % kPanelRows;
    const uint8_t* from = w.begin(panel);
    const uint16_t* shorts = reinterpret_cast<const uint16_t*>(from);
    float* to = y + i * w.in;
    for (int64_t k = 0; k < w.in; k++) {
      if (w.type(panel) == kFloat32) to[k] = reinterpret_cast<const float*>(from)[k * kPanelRows + lane];
      if (w.type(panel) == kFloat16) to[k] = float_of_half(shorts[k * kPanelRows + lane]);
      if (w.type(panel) == kBfloat16)
        to[k] = __builtin_bit_cast(float, shorts[k / 2 * 32 + lane * 2 + k % 2] << 16);
    }
    with_record(w.type(panel), [&](auto record) {
      using R = decltype(record);
      float values[kBlock * kPanelRows];
      for (int64_t b = 0; b * kBlock < w.in; b++) {
        dequantize<R>(from, R::kBlocks ? R::kBlocks : w.blocks(panel), b, b + 1, values);
        const int64_t count = std::min(kBlock, w.in - b * kBlock);
        for (int64_t k = 0; k < count; k++) to[b * kBlock + k] = values[k * kPanelRows + lane];
      }
    });
    const float gain = w.type(panel) == kNvfp4 ? w.gains(panel)[lane] : 1;
    for (int64_t k = 0; gain != 1 && k < w.in; k++) to[k] *= gain;
  });
}
DEFINE_HANDLER(PanelRows, panel_rows, kS32, XLA_FFI_DataType_U8, kS32)
