#pragma once

#include <ATen/core/Tensor.h>

#include <any>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <tessera/mesh/device_mesh.h>

namespace tessera {

/// What is sent of a parameter in place of its shard when its group is gathered, and how the parameter is made of it: for fp8 and
/// block-quantized training (FSDP2: `fsdp_pre_all_gather`, `fsdp_post_all_gather`). The shards, gradients and optimizer state
/// stay as they are; the unsharded parameter has the dtype in which forward reads it.
///
/// Both functions run on every rank of the shard dim in the same order, without grad mode, inside the read that gathers, and must
/// not read parameters of the model. `before` may communicate over `mesh`, as the maximum of all shards needs it.
class GatherExtension {
 public:
  virtual ~GatherExtension() = default;

  /// What a rank sends. The tensors are dense and on the shard's device, of any dtypes; as many, of the same dtypes, on all
  /// ranks; their shapes may differ by rank, and stay what they were in the first gather.
  struct Sent {
    std::vector<at::Tensor> tensors;
    std::any metadata = {}; ///< for `after` on this rank
  };
  /// `shard` is this rank's part: rows of dim 0, perhaps none, unless a `shard_placement_fn` says otherwise.
  virtual Sent before(const at::Tensor& shard, const DeviceMesh& mesh) = 0;

  /// What ranks sent, of rank r of the shard dim `gathered[r]`, in place: not to be kept. Writes the parameter to `out` and
  /// returns it, or returns a tensor of its shape, which is copied there.
  virtual at::Tensor after(const std::vector<std::vector<at::Tensor>>& gathered, const std::any& metadata,
                           const at::Tensor& out) = 0;
};

/// The extension of a parameter; null for none. The name is that from the module given to `fully_shard`. An extension may serve
/// several parameters. The same ones on every rank.
using GatherExtensionFn = std::function<std::shared_ptr<GatherExtension>(const std::string& name, const at::Tensor& parameter)>;

} // namespace tessera
