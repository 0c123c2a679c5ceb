// What LoRA adapters add to products and to embeddings, on CPU, called by XLA through its foreign function interface.

#include "cpu_lora.h"
#include "cpu_panel_product.h"

// y [tokens, out], which is also the result; x [tokens, in]; the number of tokens that matter; a, b, place and ranks as
// `Adapters` takes them.
static void add_adapters(const Call& call) {
  const Array& x = call.argument(1);
  const int64_t tokens = call.leading(2, x.dims[0]);
  Adapters adapters(call, 3, data<float>(x), tokens, data<float>(call.result()));
  adapters.shrink_all(call);
  adapters.expand_all(call);
}
DEFINE_HANDLER(AddAdapters, add_adapters, kF32, kF32, kS32, kAny, kAny, kS32, kS32)

// x [tokens, hidden], which is also the result; ids of the tokens; the number of tokens that matter; a
// [places, vocab, rank], of which a token's row is looked up; b, place and ranks.
static void add_to_embeddings(const Call& call) {
  const Array &x = call.argument(0), &a = call.argument(3);
  const int64_t tokens = call.leading(2, x.dims[0]), vocab = a.dims[1];
  Adapters adapters(call, 3, nullptr, tokens, data<float>(call.result()));
  const int32_t *id = data<int32_t>(call.argument(1)), *place = data<int32_t>(call.argument(5));
  for (size_t i = 0; i < adapters.order.size(); i++) {
    const int64_t token = adapters.order[i], row = place[token] * vocab + std::clamp<int64_t>(id[token], 0, vocab - 1);
    for (int64_t r = 0; r < adapters.rank; r++) {
      const int64_t at = row * adapters.rank + r;
      adapters.low[i * adapters.rank + r] =
          adapters.half ? Half::one(data<uint16_t>(a)[at]) : data<float>(a)[at];
    }
  }
  adapters.expand_all(call);
}
DEFINE_HANDLER(AddToEmbeddings, add_to_embeddings, kF32, kS32, kS32, kAny, kAny, kS32, kS32)

// y = x w^T, and what adapters add to it. x [tokens, in]; a weight in panels; the number of tokens that matter;
// a, b, place and ranks. Memory delivers the matrices A while the weight is multiplied, which leaves it idle.
static void adapted_matmul(const Call& call) {
  const Array& x = call.argument(0);
  const int64_t tokens = call.leading(3, x.dims[0]);
  if (tokens <= 0) return;
  const Panels w(call, 1, call.attribute<int64_t>("out"), call.attribute<int64_t>("inputs"));
  Adapters adapters(call, 4, data<float>(x), tokens, data<float>(call.result()));
  const int64_t pieces = adapters.pieces.size();
  multiply(call, w, tokens, call.attribute<int64_t>("arithmetic"),
           [&](Product product, int64_t item, int64_t items, int64_t first, int64_t end) {
             const int64_t begin = item * pieces / items, until = (item + 1) * pieces / items;
             Later later;
             for (int64_t i = begin; i < until; i++) later.add(adapters.rows_of_a(i), adapters.bytes_of_a(i));
             later.divide(product.steps(end - first));
             product.later = &later;
             product.run_all(first, end);
             for (int64_t i = begin; i < until; i++)
               adapters.shrink(i, product.rounded.pairs.get(), product.rounded.inputs / 2);
           });
  adapters.expand_all(call);
}
DEFINE_HANDLER(AdaptedMatmul, adapted_matmul, kF32, XLA_FFI_DataType_U8, kS32, kS32, kAny, kAny, kS32, kS32)
