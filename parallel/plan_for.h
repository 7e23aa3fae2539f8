#pragma once

#include <torch/nn/module.h>

#include <cstdint>

#include <tessera/parallel/styles.h>

namespace tessera {

/// What `plan_for` is to make.
struct PlanOptions {
  int64_t ranks = 1;     ///< of the mesh that the plan is for: what they do not divide stays out of the plan
  int64_t heads = 0;     ///< of queries; 0: what is not known is split where the ranks divide the features
  int64_t key_heads = 0; ///< of keys and values, where groups of queries share them; 0: as many as of queries
  bool sequence = false; ///< activations [batch, time, width] between the layers are split over their time
};

/// A plan of tensor parallelism, guessed from the classes and names of the layers below `module`: those that Megatron, Hugging
/// Face's models, LibTorch's Transformer and the examples have ("q_proj", "qkv", "up", "fc1", "out_proj", "down", "lm_head", …).
/// Print it with `to_string` before it is used. A wrong guess costs traffic, and changes no number; what is not recognised is
/// replicated. No communication.
ParallelPlan plan_for(torch::nn::Module& module, const PlanOptions& options);

} // namespace tessera
