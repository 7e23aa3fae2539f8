#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

namespace tessera {

/// Takes a step of `optimizer`, and returns what `closure` did. Where its parameters lie in files (`offload_to_files`), the step
/// goes from one group of `fully_shard` to the next: while one computes, the next is read and the one before is written back, by
/// way of three buffers on the host of a group's parameters, gradients and optimizer state. State that a step creates goes to the
/// files with its group. Otherwise it is `optimizer.step(closure)`.
///
/// The result is that of a step over all parameters at once, for optimizers whose step computes with one parameter at a time:
/// those of LibTorch but LBFGS, which is an error, and classes of a program's own that `register_optimizer` knows, whose
/// registered options and values change in a step as if it was called once. `optimizer.step()` itself works too: it reads and
/// writes through the system's page cache, and the state that it creates stays in memory until a call of this function.
///
/// Every rank of the parameters' meshes calls it where they lie in files. An error of one rank, such as that of a disk, is an
/// error of all; what was stepped before it stays so.
at::Tensor step(torch::optim::Optimizer& optimizer, const torch::optim::Optimizer::LossClosure& closure = nullptr);

} // namespace tessera
