#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

namespace tessera {

/// Takes a step of `optimizer`, and returns the result of `closure`. If its parameters are in files (`offload_to_files`), it
/// steps one group of `fully_shard` after another. While one group computes, the next is read and the last is written, through
/// three buffers on the host, each for a group's parameters, gradients and optimizer state. State that a step creates goes to the
/// files with its group. Otherwise it is `optimizer.step(closure)`.
///
/// The result equals that of a step over all parameters at once, if the optimizer updates one parameter at a time. This holds for
/// LibTorch's optimizers except LBFGS, which is an error, and for your own classes that `register_optimizer` knows. Their
/// registered options and values change as in a single step. `optimizer.step()` itself works too. It reads and writes through the
/// system's page cache, and the state that it creates stays in memory until a call of this function.
///
/// If the parameters are in files, every rank of their meshes calls it. An error of one rank, for example of a disk, is an error
/// of all ranks; groups that were stepped before it stay stepped.
at::Tensor step(torch::optim::Optimizer& optimizer, const torch::optim::Optimizer::LossClosure& closure = nullptr);

} // namespace tessera
