#pragma once

#include <c10/core/DeviceType.h>

namespace tessera {

/// Gives the meta device those operators that LibTorch computes the shapes of in Python alone: norms, embeddings, attention,
/// convolutions, poolings, losses, and others that models have. Their results and what autograd keeps of them have the shapes,
/// dtypes and strides of the CPU's. An operator that has a kernel for the meta device, of LibTorch's or of the program's, keeps
/// it. The first call registers them, any other does nothing. Any thread may call it.
void register_meta_operators();

/// While it lives, operators of the meta device on this thread keep what those of another device keep, where they differ: on
/// CUDA, norms keep their statistics in fp32, an RMS norm is one operator, dropout keeps a mask of bools, and attention with
/// dropout keeps no weights.
class MetaOperatorsOf {
 public:
  /// An error for another device than the CPU and CUDA.
  explicit MetaOperatorsOf(c10::DeviceType device);
  ~MetaOperatorsOf();
  MetaOperatorsOf(const MetaOperatorsOf&) = delete;
  MetaOperatorsOf& operator=(const MetaOperatorsOf&) = delete;

 private:
  c10::DeviceType before_;
};

} // namespace tessera
