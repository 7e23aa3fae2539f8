#pragma once

#include <ATen/core/Tensor.h>

#include <any>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <tessera/mesh/device_mesh.h>

namespace torch::nn {
class Module;
}

namespace tessera {

/// What is sent of a parameter instead of its shard when its group is gathered, and how the parameter is built from it: for fp8
/// and block-quantized training (FSDP2: `fsdp_pre_all_gather`, `fsdp_post_all_gather`). The shards, gradients and optimizer state
/// do not change; the unsharded parameter has the dtype in which forward reads it.
///
/// Both functions run on every rank of the shard dim in the same order, without grad mode, inside the read that gathers. They
/// must not read parameters of the model. `before` may communicate over `mesh`, for example to compute the maximum of all shards.
class GatherExtension {
 public:
  virtual ~GatherExtension() = default;

  /// What a rank sends. The tensors are dense, on the shard's device, and of any dtypes. Their number and dtypes are the same on
  /// all ranks. Their shapes may differ between ranks, but not between gathers.
  struct Sent {
    std::vector<at::Tensor> tensors;
    std::any metadata = {}; ///< for `after` on this rank
  };
  /// `shard` is this rank's part: rows of dim 0, perhaps none, unless a `shard_placement_fn` says otherwise.
  virtual Sent before(const at::Tensor& shard, const DeviceMesh& mesh) = 0;

  /// `gathered[r]` are the tensors that rank r of the shard dim sent; do not keep them. Writes the parameter to `out` and
  /// returns `out`, or returns a tensor of its shape, which is copied to `out`.
  virtual at::Tensor after(const std::vector<std::vector<at::Tensor>>& gathered, const std::any& metadata,
                           const at::Tensor& out) = 0;
};

/// The extension of a parameter; null for none. The name is relative to the module given to `fully_shard`. An extension may serve
/// several parameters. Every rank chooses the same.
using GatherExtensionFn = std::function<std::shared_ptr<GatherExtension>(const std::string& name, const at::Tensor& parameter)>;

/// Gathers the weights of the Linears that `convert_to_float8` took in `module` and below as float8_e4m3fn, with one scale each
/// for all shards, and the other parameters as they are (torchao: enable_fsdp_float8_all_gather). The codes are those that the
/// product makes of the weight. So without a `param_dtype` results are the same, bit for bit; with one, shards are rounded once
/// and not twice. A gather takes one all-reduce of a number a weight besides, unless `precompute_float8_scales` made the scales.
///
/// Call it after `convert_to_float8`; it knows the parameters, under whatever names. Errors: nothing was converted; a Linear with
/// scales of rows, of which each product has others.
GatherExtensionFn float8_gather(const torch::nn::Module& module);

/// Makes the scales of all weights in `module` and below that `float8_gather` gathers: one all-reduce of a number a weight for
/// all those of a mesh, in place of one at each gather of each (torchao: precompute_float8_dynamic_scale_for_fsdp). The gathers
/// until the next write of a weight take its scale, which is the same one.
///
/// Call it after each step of the optimizer, on every rank, or nowhere: a gather of a weight that was written since makes its
/// scale itself. Weights that are offloaded make theirs at each gather. Without such weights it does nothing. An error where
/// nothing below the module was sharded.
void precompute_float8_scales(const torch::nn::Module& module);

} // namespace tessera
