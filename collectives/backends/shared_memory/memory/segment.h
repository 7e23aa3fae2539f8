#pragma once

#include <sys/types.h>
#include <cstdint>

namespace tessera::internal::shared_memory {

inline constexpr int64_t kPage = 4096; ///< bytes

/// Memory that processes of this host share: a file without a name (memfd). It ends with the last process that has it open or
/// mapped, however that ends, and takes nothing of /dev/shm. Processes of other users cannot open it.
class Segment {
 public:
  Segment() = default;
  /// Zeroed memory. The first `reserved` bytes have their pages, so that touching them cannot fail; `reserve` makes others.
  /// Throws c10::Error with the cause where this process may not have so much.
  static Segment create(int64_t bytes, int64_t reserved);
  /// The one that `process` has open as `descriptor`, which must be of `bytes`. Throws c10::Error with the cause.
  static Segment open(pid_t process, int descriptor, int64_t bytes);
  ~Segment();
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  int descriptor() const { return descriptor_; }
  /// The pages of a part. Throws c10::Error where there is no memory for them; some may be there then.
  void reserve(int64_t offset, int64_t bytes) const;
  /// Gives them back; what they held is lost in all processes.
  void release(int64_t offset, int64_t bytes) const noexcept;

 private:
  void map(int64_t bytes);

  char* data_ = nullptr;
  int64_t bytes_ = 0;
  int descriptor_ = -1;
};

} // namespace tessera::internal::shared_memory
