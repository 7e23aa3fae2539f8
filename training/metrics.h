#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <tessera/collectives/communicator.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera {

/// The reduction of `tensor` over all ranks of `mesh`, element by element: a new tensor of the same shape and dtype on the mesh's
/// device, the same to the bit on every rank, without history. kAvg takes floating-point dtypes.
///
/// Every rank of the mesh calls it, in the same order as its other reductions over these ranks. If shapes, dtypes or `op`
/// differ between the ranks, or a rank passes a DTensor (which is global already), every rank throws an error that lists the
/// calls of all ranks, and the next call works. Semantics: all_reduce of torch.distributed.
at::Tensor all_reduce(const at::Tensor& tensor, const DeviceMesh& mesh, ReduceOp op);

/// Reduces named numbers in one collective and in double. Names that differ between the ranks are an error on every rank.
std::map<std::string, double> all_reduce(const std::map<std::string, double>& values, const DeviceMesh& mesh, ReduceOp op);

/// Running means. Each is stored as the sum of values times weights, and the sum of the weights. So the mean over ranks, and over
/// batches of different sizes, is the mean over all samples. Kept in double on the host.
class RunningMeans {
 public:
  /// The names are given here, so that a rank without any sample knows them too. An error if there are none, or if one appears
  /// twice.
  explicit RunningMeans(std::vector<std::string> names);

  /// Adds `value` with a `weight`: for the mean over a batch, the number of its samples. An error for an unknown name, and for a
  /// weight that is negative or not finite.
  void add(const std::string& name, double value, double weight = 1);
  /// Adds each element of `values`, any shape and real dtype, with weight 1: losses of single samples, or booleans.
  void add(const std::string& name, const at::Tensor& values);
  /// Adds how many of the `targets` are among the `k` best scores: `scores` [..., classes], `targets` [...] of integers. Targets
  /// equal to `ignored` do not count. Errors for other shapes, and `k` below 1 or above the number of classes.
  void add_accuracy(const std::string& name, const at::Tensor& scores, const at::Tensor& targets, int64_t k = 1,
                    int64_t ignored = -100);

  /// The means over all ranks of `mesh`: one collective, which every one of them calls. NaN for a name that no rank added
  /// anything to.
  std::map<std::string, double> means(const DeviceMesh& mesh) const;
  /// The sums of the weights: if the weights are numbers of samples, the number of all samples.
  std::map<std::string, double> counts(const DeviceMesh& mesh) const;
  /// The means and the sums of weights of this rank only. Local.
  std::map<std::string, double> means() const;
  std::map<std::string, double> counts() const;
  void reset();

 private:
  struct Sum {
    double total = 0, weight = 0;
  };
  Sum& sum_of(const std::string& name);
  RunningMeans over(const DeviceMesh& mesh) const; ///< the sums of all ranks

  std::map<std::string, Sum> sums_;
};

} // namespace tessera
