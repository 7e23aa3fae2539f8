#pragma once

// A simulated asynchronous accelerator on PyTorch's key PrivateUse1, for tests of the order of streams without a GPU.
//
// Its memory is the host's. Every stream is a queue with a thread of its own that runs the CPU's kernels, after delays drawn with
// a seed. Streams, events and guards are those of c10; memory is handed out again as CUDA's caching allocator does. A checker
// finds every pair of accesses that nothing orders, whatever the timing.

#include <tessera/tests/support/simulated_device/caching_allocator.h>
#include <tessera/tests/support/simulated_device/counters.h>
#include <tessera/tests/support/simulated_device/region.h>
#include <tessera/tests/support/simulated_device/runtime.h>
#include <tessera/tests/support/simulated_device/stream.h>
#include <tessera/tests/support/simulated_device/time_line.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace tessera::testing::sim {

inline const c10::Device kDevice(kDeviceType, 0);

struct Options {
  Delays delays;
  Poison poison = Poison::kAtReuse;
  TimeModel time;
};

/// Makes the device known to PyTorch and to Tessera, as "sim". Before autograd is first used in the process. A second call does
/// nothing.
void enable();

/// Waits for all streams, and sets how they run from here on.
void configure(const Options& options);

/// Blocks until all streams are idle, and throws the error that work ended with.
void synchronize();

c10::Stream stream(); ///< the calling thread's current one
c10::Stream default_stream();
c10::Stream new_stream(const std::string& name); ///< that races and the time line call it by

/// Runs `work` on the stream as a kernel that reads and writes these tensors. It must own none of them: see `cpu_alias`.
void launch(const c10::Stream& stream, const std::string& name, const std::vector<at::Tensor>& reads,
            const std::vector<at::Tensor>& writes, std::function<void()> work, double modelled_us = 0);
/// A CPU tensor over the same memory that owns nothing.
at::Tensor cpu_alias(const at::Tensor& tensor);

Counters counters();
void reset_counters();
/// The races since the last `reset_races`, in words, each with the number of times it was found.
std::map<std::string, int64_t> races();
void reset_races();

} // namespace tessera::testing::sim
