// A parallel loop on a thread pool of our own, whose threads busy-wait for the next loop.
//
// A step has hundreds of loops of a few microseconds each, in direct sequence. Waking a sleeping thread takes longer
// than many of them, so an idle thread polls for a while before it sleeps.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "cpu_ffi.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// The threads of a process, which all libraries share (`jaxserve_use_pool`). Only one loop at a time.
class Pool {
 public:
  // Calls f(context, i) for i < count, on the caller and up to `threads - 1` others. Returns false if a loop is
  // running.
  bool run(int64_t threads, int64_t count, void (*f)(const void*, int64_t), const void* context) {
    if (busy_.exchange(true, std::memory_order_acquire)) return false;
    for (; started_ < threads - 1; started_++) std::thread([this] { help(); }).detach();
    f_ = f, context_ = context, count_ = count, control_ = control();
    next_.store(0, std::memory_order_relaxed), left_.store(0, std::memory_order_relaxed);
    const uint64_t turn = (state_.load(std::memory_order_relaxed) >> 32) + 1;
    state_.store(turn << 32 | kOpen);
    const int64_t sleeping = asleep_.load(), wanted = std::min(threads, count) - 1;
    if (wanted > started_ - sleeping) {
      std::lock_guard<std::mutex> lock(mutex_);
      for (int64_t i = started_ - sleeping; i < wanted; i++) wake_.notify_one();
    }
    work();
    // The loop is closed to threads that come now. Threads that came before are awaited: they may be at the last
    // pieces.
    const uint64_t came = state_.fetch_and(~kOpen) & (kOpen - 1);
    for (int64_t i = 0; left_.load(std::memory_order_acquire) < came; i++) rest(i);
    busy_.store(false, std::memory_order_release);
    return true;
  }

 private:
  static constexpr uint64_t kOpen = uint64_t{1} << 31;
  static constexpr auto kLookout = std::chrono::microseconds(200);

  std::atomic<bool> busy_{false};
  void (*f_)(const void*, int64_t) = nullptr;
  const void* context_ = nullptr;
  int64_t count_ = 0, started_ = 0;
  uint64_t control_ = 0;
  std::atomic<int64_t> asleep_{0};
  alignas(64) std::atomic<uint64_t> state_{0};  // number of the loop, whether it is open, how many helpers came
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint64_t> left_{0};
  std::mutex mutex_;
  std::condition_variable wake_;

  void work() {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) f_(context_, i);
  }

  // Waits a little before polling again. Every 32nd turn yields the core to other threads.
  static void rest(int64_t turn) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
    if (turn % 32 == 31) std::this_thread::yield();
  }

  // The caller's rounding mode, and whether it flushes subnormal numbers. Helpers must use the same modes.
#if defined(__x86_64__)
  static uint64_t control() { return _mm_getcsr() & ~0x3fu; }
  static void adopt(uint64_t control) { _mm_setcsr(control); }
#elif defined(__aarch64__)
  static uint64_t control() {
    uint64_t bits;
    asm volatile("mrs %0, fpcr" : "=r"(bits));
    return bits;
  }
  static void adopt(uint64_t control) { asm volatile("msr fpcr, %0" : : "r"(control)); }
#else
  static uint64_t control() { return 0; }
  static void adopt(uint64_t) {}
#endif

  // The main function of a helper thread.
  void help() {
    uint64_t seen = 0;
    auto until = std::chrono::steady_clock::now() + kLookout;
    for (int64_t turn = 0;; turn++) {
      uint64_t state = state_.load(std::memory_order_acquire);
      if (state & kOpen && state >> 32 != seen) {
        if (!state_.compare_exchange_strong(state, state + 1)) continue;
        seen = state >> 32;
        adopt(control_);
        work();
        left_.fetch_add(1, std::memory_order_release);
        until = std::chrono::steady_clock::now() + kLookout;
        continue;
      }
      rest(turn);
      if (turn % 32 == 31 && std::chrono::steady_clock::now() > until) {
        std::unique_lock<std::mutex> lock(mutex_);
        asleep_++;
        wake_.wait(lock, [&] { return state_.load() & kOpen && state_.load() >> 32 != seen; });
        asleep_--;
        until = std::chrono::steady_clock::now() + kLookout;
      }
    }
  }
};

static Pool*& pool() {
  static Pool* shared = new Pool();  // never deleted: its threads end with the process
  return shared;
}
extern "C" void* jaxserve_pool() { return pool(); }
extern "C" void jaxserve_use_pool(void* shared) { pool() = static_cast<Pool*>(shared); }

// Runs f(0) .. f(count - 1) on the caller and as many other threads as XLA would use. Returns when all are done. Runs
// on the caller only if the threads are busy with another loop.
template <class F>
static void parallel_for(const Call& call, int64_t count, F f) {
  const auto one = [](const void* context, int64_t i) { (*static_cast<const F*>(context))(i); };
  const int64_t threads = count > 1 ? call.num_threads() : 1;
  if (threads > 1 && pool()->run(threads, count, one, &f)) return;
  for (int64_t i = 0; i < count; i++) f(i);
}
