#pragma once

// Internal: host memory that direct I/O takes.

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/util/Exception.h>
#include <malloc.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>

#include <tessera/base/tensor_over.h>

namespace tessera::internal {

/// Of files' blocks and of pages.
inline constexpr int64_t kPageBytes = 4096;

constexpr int64_t whole_pages(int64_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

/// Uninitialized memory of whole pages, at the start of one.
inline c10::Storage aligned_memory(int64_t bytes) {
  constexpr size_t kHugePage = size_t{2} << 20;
  const auto size = static_cast<size_t>(whole_pages(bytes));
  void* memory = nullptr;
  const int error = ::posix_memalign(&memory, size < kHugePage ? static_cast<size_t>(kPageBytes) : kHugePage, size);
  TORCH_CHECK(error == 0, "offload: no memory for a buffer of ", size, " bytes");
  ::madvise(memory, size, MADV_HUGEPAGE); // fewer page faults, where the kernel has them
  return {c10::Storage::use_byte_size_t(), size, c10::DataPtr(memory, memory, &std::free, c10::kCPU)};
}

/// `bytes` from the start of the first page of `storage`, of whatever device, which has a page more than these take.
inline at::Tensor from_page(const c10::Storage& storage, int64_t bytes) {
  const auto past_page = static_cast<int64_t>(reinterpret_cast<uintptr_t>(storage.data()) % kPageBytes);
  return tensor_over(storage, (kPageBytes - past_page) % kPageBytes, {bytes}, at::kByte);
}

/// Gives what the program has freed back to the system. glibc's heap keeps it, and before 2.38 does not use the blocks of tensors
/// again, which are aligned: what was moved to files would take the memory as before.
inline void release_freed_memory() {
#ifdef __GLIBC__
  ::malloc_trim(0);
#endif
}

} // namespace tessera::internal
