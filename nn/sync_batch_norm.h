#pragma once

#include <torch/nn/modules/batchnorm.h>

#include <string>
#include <vector>

#include <tessera/collectives/communicator.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera {

/// Batch normalization of inputs [N, C] or [N, C, …], whose mean and variance are those of the rows of all ranks of a mesh
/// (Python: torch.nn.SyncBatchNorm). Parameters, buffers, options and formulas are those of torch::nn::BatchNorm1d, 2d and 3d.
///
/// If it uses the batch's statistics (in training, and also in evaluation if it has no running ones), its forward and its
/// backward communicate: every rank of the mesh runs them, in the same order. Ranks may have different numbers of rows, or none,
/// other dtypes of inputs, other dims after [N, C], and other frozen parameters. If the input requires a gradient on only one
/// rank, the output requires one on all ranks, because all run the backward. A wrong input on one rank (other channels, integers)
/// is an error on every rank, which names that rank. So is a backward if a rank ran the forward without grad mode. If only one
/// rank is in evaluation mode, it does not take part, and the others wait for it until the timeout.
/// The running statistics are equal bit for bit on every rank. One value per channel on all ranks together is an error. The
/// gradients of weight and bias are those of this rank's rows, as in any module. The input may be in half precision while
/// parameters and buffers are in float; the output has the dtype of the input. A gradient of a gradient (create_graph) is an
/// error.
class SyncBatchNormImpl : public torch::nn::NormImplBase<0, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  /// Every rank of `mesh` (of any number of dims) calls it, in the same order.
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, const DeviceMesh& mesh);

  at::Tensor forward(const at::Tensor& input);
  void pretty_print(std::ostream& stream) const override;
  const DeviceMesh& mesh() const { return mesh_; }

 protected:
  /// Nothing: forward asks all ranks.
  void _check_input_dim(const at::Tensor&) override {} // NOLINT(readability-identifier-naming): LibTorch's name

 private:
  DeviceMesh mesh_;
  CommunicatorPtr communicator_;
};

/// `tessera::SyncBatchNorm norm(64, mesh);`
class SyncBatchNorm : public torch::nn::ModuleHolder<SyncBatchNormImpl> {
 public:
  using torch::nn::ModuleHolder<SyncBatchNormImpl>::ModuleHolder;
};

/// Makes every torch::nn::BatchNorm1d, 2d and 3d in `module` and below, and those of a ScriptModule, take its statistics over all
/// ranks of `mesh`, as SyncBatchNorm does, and returns their names.
///
/// Nothing is replaced: the modules keep their types, names, parameters and buffers, so members and checkpoints stay as they are,
/// and it may be called before or after `fully_shard`, and again, with another mesh. A copy made by `clone` is a plain BatchNorm.
/// Every rank of the mesh calls it, in the same order. In training LibTorch throws for an input with one value per channel, or
/// with a wrong number of dims, before the ranks can communicate. The other ranks then wait for this one until the timeout. If a
/// rank's part of the batch may be one row of [N, C], use SyncBatchNorm instead.
/// Errors name the module: statistics that are a DTensor, or that were made in InferenceMode; a script's that has none.
std::vector<std::string> convert_sync_batch_norm(torch::nn::Module& module, const DeviceMesh& mesh);

namespace internal {

/// Whether `convert_sync_batch_norm` took the module that has these running statistics.
bool is_synchronized(const at::Tensor& running_mean);
/// Makes `to`, which is about to take the place of the running statistics `from`, synchronized as they are.
void keep_synchronized(const at::Tensor& from, const at::Tensor& to);

} // namespace internal

} // namespace tessera
