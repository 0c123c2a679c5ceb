// A loop over XLA's threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "cpu_ffi.h"

// Runs f(0) .. f(count - 1) on the caller and XLA's threads; returns when all are done. A helper that comes late finds
// nothing left to do, so that nobody ever waits for a thread to be free.
template <class F>
static void parallel_for(const Call& call, int64_t count, F f) {
  struct Progress {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto progress = std::make_shared<Progress>();
  auto work = [progress, count, f] {
    for (int64_t i; (i = progress->next.fetch_add(1)) < count; progress->done.fetch_add(1)) f(i);
  };
  int64_t helpers = std::min(call.num_threads(), count) - 1;
  for (int64_t i = 0; i < helpers; i++) call.schedule(work);
  work();
  while (progress->done.load() < count) std::this_thread::yield();
}
