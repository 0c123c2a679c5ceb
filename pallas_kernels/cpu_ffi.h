// The interface between XLA and a kernel: the C side of its foreign function interface (xla/ffi/api/c_api.h of jaxlib).
//
// The C++ side would more than double the compiler's time, for which the first start waits.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <string_view>

#include "xla/ffi/api/c_api.h"

using Array = XLA_FFI_Buffer;  // dtype, data, rank, dims
constexpr int kF32 = XLA_FFI_DataType_F32, kS32 = XLA_FFI_DataType_S32, kS8 = XLA_FFI_DataType_S8, kAny = -1;

template <class T>
static T* data(const Array& a) {
  return static_cast<T*>(a.data);
}

static inline int64_t element_count(const Array& a) {
  int64_t count = 1;
  for (int64_t i = 0; i < a.rank; i++) count *= a.dims[i];
  return count;
}

// With -DJAXSERVE_CHECKED kernels check what they read of arrays that the host makes (slots, block tables, beginnings of
// rows, ranks, counts) against the arrays that it indexes. They do so before they begin, on the calling thread.
#ifdef JAXSERVE_CHECKED
constexpr bool kChecked = true;
#else
constexpr bool kChecked = false;
#endif

struct OutOfBounds {
  std::string what;
};

// Throws OutOfBounds unless value, number [i] or [i, j] of the array `name`, is in [first, end).
static inline void check_index(const char* name, int64_t value, int64_t first, int64_t end, int64_t i = -1,
                               int64_t j = -1) {
  if (value >= first && value < end) return;
  std::string what = name;
  if (i >= 0) what += "[" + std::to_string(i) + (j >= 0 ? ", " + std::to_string(j) : "") + "]";
  throw OutOfBounds{what + " is " + std::to_string(value) + ", not in [" + std::to_string(first) + ", " +
                    std::to_string(end) + ")"};
}

// Checks that each of `count` experts has some of `rows` rows: as many as `sizes` says.
static inline void check_sizes(const int32_t* sizes, int64_t count, int64_t rows) {
  for (int64_t e = 0; e < count; rows -= sizes[e++]) check_index("group_sizes", sizes[e], 0, rows + 1, e);
}

struct Call {
  XLA_FFI_CallFrame* frame;

  const Array& argument(int64_t i) const { return *static_cast<const Array*>(frame->args.args[i]); }
  const Array& result(int64_t i = 0) const { return *static_cast<const Array*>(frame->rets.rets[i]); }

  // The number that the caller passed under this name.
  template <class T>
  T attribute(std::string_view name) const {
    for (int64_t i = 0; i < frame->attrs.size; i++)
      if (name == std::string_view(frame->attrs.names[i]->ptr, frame->attrs.names[i]->len))
        return *static_cast<const T*>(static_cast<const XLA_FFI_Scalar*>(frame->attrs.attrs[i])->value);
    std::abort();
  }

  // How many of `rows` rows matter, which argument i says: the first ones.
  int64_t leading(int64_t i, int64_t rows) const {
    const int64_t count = *data<int32_t>(argument(i));
    if (kChecked) check_index("the number of rows that matter", count, 0, INT64_MAX);
    return std::min(rows, count);
  }

  int64_t num_threads() const {
    int64_t count = 1;
    auto args = make<XLA_FFI_ThreadPool_NumThreads_Args>(XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE);
    args.ctx = frame->ctx, args.num_threads = &count;
    if (XLA_FFI_Error* error = frame->api->XLA_FFI_ThreadPool_NumThreads(&args)) {
      auto forget = make<XLA_FFI_Error_Destroy_Args>(XLA_FFI_Error_Destroy_Args_STRUCT_SIZE);
      forget.error = error;
      frame->api->XLA_FFI_Error_Destroy(&forget);
    }
    return count;
  }

  XLA_FFI_Error* error(const char* message) const {
    auto args = make<XLA_FFI_Error_Create_Args>(XLA_FFI_Error_Create_Args_STRUCT_SIZE);
    args.message = message, args.errc = XLA_FFI_Error_Code_INVALID_ARGUMENT;
    return frame->api->XLA_FFI_Error_Create(&args);
  }

 private:
  template <class Args>
  static Args make(size_t struct_size) {
    Args args{};
    args.struct_size = struct_size;
    return args;
  }
};

// Runs a kernel after checking its arguments' types. Before the first call, XLA asks for the interface's version
// instead.
static XLA_FFI_Error* run(XLA_FFI_CallFrame* frame, const char* name, void (*kernel)(const Call&),
                          std::initializer_list<int> types) {
  if (const auto extension = frame->extension_start; extension && extension->type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata* metadata = reinterpret_cast<XLA_FFI_Metadata_Extension*>(extension)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    metadata->state_type_id = XLA_FFI_UNKNOWN_TYPE_ID;
    return nullptr;
  }
  const Call call{frame};
  if (frame->args.size != static_cast<int64_t>(types.size())) return call.error("a wrong number of arguments");
  for (int64_t i = 0; i < frame->args.size; i++) {
    const int type = types.begin()[i];
    if (type != kAny && type != call.argument(i).dtype) return call.error("an argument of a wrong type");
  }
#ifdef JAXSERVE_CHECKED
  try {
    kernel(call);
  } catch (const OutOfBounds& found) {
    return call.error((std::string(name) + ": " + found.what).c_str());
  }
#else
  kernel(call);
#endif
  return nullptr;
}

// Defines the entry point `name` for XLA. The kernel's argument types follow.
#define DEFINE_HANDLER(name, kernel, ...) \
  extern "C" XLA_FFI_Error* name(XLA_FFI_CallFrame* frame) { return run(frame, #name, kernel, {__VA_ARGS__}); }
