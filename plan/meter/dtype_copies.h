#pragma once

// Internal: what operators on several dtypes allocate on a CPU.

#include <ATen/record_function.h>

namespace tessera::internal {

/// While one lives, an element-wise operator of this thread on meta tensors of several dtypes takes the memory that it takes on a
/// CPU besides: its kernels know one dtype, so that arguments of another one are copied for as long as it runs. What has one
/// element, or no dims, is not copied.
class DtypeCopies {
 public:
  DtypeCopies();
  ~DtypeCopies();
  DtypeCopies(const DtypeCopies&) = delete;
  DtypeCopies& operator=(const DtypeCopies&) = delete;

 private:
  at::CallbackHandle handle_;
};

} // namespace tessera::internal
