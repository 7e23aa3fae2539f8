#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/collectives/counters.h>
#include <tessera/collectives/rank_list.h>
#include <tessera/collectives/work.h>

namespace tessera {

enum class ReduceOp { kSum, kAvg, kMin, kMax, kProduct };

/// A group of ranks that run collectives together, in the same order on every rank.
///
/// Every collective is called by every rank of the group, from any thread, in the same order on all of them. Tensors are
/// contiguous ("flat") and on the group's device; sizes are in elements. `label` names what is sent (a parameter group, a
/// parameter): it is part of the collective's signature, which ranks compare, and of every error. Collectives start
/// asynchronously in stream order; `Work::wait` makes the result visible. After a failure the communicator cannot be used again.
///
/// Reductions are of bool, uint8, the signed integers, fp16, bf16, fp32 and fp64; kAvg is of the floating-point ones. On the CPU,
/// fp16 and bf16 are summed as fp32 and rounded once; NCCL rounds each of its sums.
class Communicator {
 public:
  virtual ~Communicator() = default;

  int rank() const { return rank_; } ///< this process's index in `ranks()`
  int size() const { return static_cast<int>(ranks_.size()); }
  const std::vector<int64_t>& ranks() const { return ranks_.expanded(); } ///< global ranks, in group order
  const RankList& rank_list() const { return ranks_; }                    ///< the same, however many they are
  const std::string& name() const { return name_; }
  at::DeviceType device_type() const { return device_type_; }

  /// `output` [size × input.numel()] receives the inputs of rank 0, 1, … one after another. `input` may be the view of
  /// `output` at this rank's place.
  virtual Work all_gather_into(const at::Tensor& output, const at::Tensor& input, std::string_view label) = 0;
  /// `output` [n] receives the reduction over ranks of the `rank()`-th n elements of `input` [size × n]. `input` may be
  /// overwritten, and `output` the view of it at this rank's place.
  virtual Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, std::string_view label) = 0;
  /// Whether kAvg of this dtype is as exact as a sum that is divided afterwards. False if the communicator divides before it
  /// adds, so that small numbers become 0. The same on every rank.
  virtual bool averages(at::ScalarType /*dtype*/) const { return true; }
  /// Whether `reduce_scatter_scaled` can be called with tensors of this dtype. The same on every rank.
  virtual bool scales(at::ScalarType /*dtype*/) const { return false; }
  /// Does what `reduce_scatter` does with a sum, of inputs that the communicator multiplies by `factor` first (NCCL: PREMUL_SUM).
  virtual Work reduce_scatter_scaled(const at::Tensor& output, const at::Tensor& input, double factor, std::string_view label);
  /// `tensor` becomes the reduction over all ranks, in place and on each of them.
  virtual Work all_reduce(const at::Tensor& tensor, ReduceOp op, std::string_view label) = 0;
  /// Sends `input_splits[r]` elements to rank r and receives `output_splits[r]` from it; empty splits mean equal parts. The
  /// tensors do not overlap.
  virtual Work all_to_all(const at::Tensor& output, const at::Tensor& input, const std::vector<int64_t>& output_splits,
                          const std::vector<int64_t>& input_splits, std::string_view label) = 0;
  /// `root`, and the peers below, are indices in `ranks()`.
  virtual Work broadcast(const at::Tensor& tensor, int root, std::string_view label) = 0;
  /// `tensor` goes to rank `to`, which calls `receive` with a tensor of the same size and dtype, and the same label. The messages
  /// from one rank to another come in the order of their calls; no other rank takes part. Done when the receiver has it. Over
  /// NCCL two ranks that send to each other call both inside `coalesced`: each of its kernels waits for those before it.
  virtual Work send(const at::Tensor& tensor, int to, std::string_view label);
  virtual Work receive(const at::Tensor& tensor, int from, std::string_view label);
  /// Uninitialized memory on the group's device for the tensors of its collectives. Over shared memory the other ranks read such
  /// inputs without a copy. Local; freed with the DataPtr.
  virtual c10::DataPtr allocate(int64_t bytes);
  /// Runs the collectives that `issue` calls on this communicator as one launch (NCCL) and returns one `Work` for all of them;
  /// the `Work`s of the single calls are not waited for. Every rank issues the same ones. Calls do not nest.
  virtual Work coalesced(const std::function<void()>& issue) = 0;
  /// Returns when every rank has called it.
  virtual void barrier(std::string_view label) = 0;

  /// Called instead of a collective that the other ranks call and this rank cannot. If ranks compare their calls, the collective
  /// of the others ends with an error that names this rank and begins with `cause`. If they do not, this rank leaves the group,
  /// so that its later data is not taken for the missing data. Each further call here is then an error, and the others wait until
  /// a connection breaks or their timeout is over. May throw the error of the others.
  virtual void give_up(std::string_view cause);
  /// Ends the calls in flight with an error, and allows no further calls. For the other ranks this rank has left. Only CPU
  /// transports, and communicators that forward to one, do this. Others wait for their calls in their destructors.
  virtual void close() {}

  /// From now on collectives run on the calling thread's current stream, instead of the communicator's own stream: for callers
  /// that have a stream for them. `Work::wait` is still needed. No effect on the CPU.
  virtual void run_on_current_stream() {}

  /// Calls and bytes so far, by operation.
  virtual CollectiveCounters& counters() { return counters_; }

 protected:
  Communicator(std::string name, RankList ranks, int rank, at::DeviceType device_type)
      : name_(std::move(name)), ranks_(std::move(ranks)), rank_(rank), device_type_(device_type) {}

  CollectiveCounters counters_;

 private:
  std::string name_;
  RankList ranks_;
  int rank_;
  at::DeviceType device_type_;
};

using CommunicatorPtr = std::shared_ptr<Communicator>;

} // namespace tessera
