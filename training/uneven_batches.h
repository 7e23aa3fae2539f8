#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <tessera/collectives/communicator.h>
#include <tessera/fsdp/fully_shard.h>

namespace tessera {

/// What the gradients of a step are divided by where some ranks have no input left.
enum class UnevenDivisor {
  kAllRanks, ///< all ranks, as in any other step: those without input count as zero
  /// Those that have input: the mean over what there is. An error, on every rank, in a model with a group whose gradients are
  /// divided by another number than that of the model's ranks: of a mesh of its own, as an expert's, or by a
  /// `set_gradient_divide_factor`. With that number as its factor an expert's gradients are divided as the others'.
  kRanksWithInput,
};

namespace internal {

/// The agreements of a model's ranks on who has input left.
class UnevenRounds {
 public:
  UnevenRounds(const torch::nn::Module& model, UnevenDivisor divisor);
  ~UnevenRounds() { end(); }
  UnevenRounds(const UnevenRounds&) = delete;
  UnevenRounds& operator=(const UnevenRounds&) = delete;

  /// How many ranks have input; 0 ends the rounds. An error on all ranks where one has neither input nor something in its place,
  /// or a group that `divisor` does not fit.
  int64_t begin(bool has_input, bool can_stand_in);
  /// Gives the gradients the weight that they have without these rounds.
  void end();

 private:
  std::string divided_otherwise() const;

  std::optional<FSDPModule> model_; ///< none: the model is not sharded, and runs alone
  UnevenDivisor divisor_;
  CommunicatorPtr communicator_; ///< null on one rank
};

} // namespace internal

/// The batches of this rank, for ranks that have different numbers of them: a rank without input takes part until all are out
/// (PyTorch: `Join`).
///
/// ```cpp
/// tessera::UnevenBatches batches(*model, *loader);
/// for (auto& batch : batches) { loss(*model, batch).backward(); optimizer.step(); … }   // the same on every rank
/// ```
///
/// A rank that is out gets its last batch again, or `stand_in`, and runs forward and backward as the others do. What its backward
/// brings to sharded parameters is dropped, NaN too: it counts as zero. Its other effects stay: loss, buffers (BatchNorm's
/// statistics), the gradients of parameters that nothing shards, and what the model itself communicates in forward, as a
/// synchronized BatchNorm does. An empty batch as `stand_in` leaves these alone. A rank that never had a batch needs a
/// `stand_in`. Where loops overlap, as with an evaluation inside, the one that began last counts until it ends.
///
/// All ranks of the model iterate, once a step; each step costs one all-reduce of three numbers. `range` is anything with `begin`
/// and `end`, such as a DataLoader, and is iterated once for each `begin` of this. With a model that is not sharded it is a plain
/// loop; one that only holds sharded modules is an error, and so is one that trains parameters which another model has.
template <typename Range>
class UnevenBatches {
 public:
  using Batch = std::decay_t<decltype(*std::declval<Range&>().begin())>;
  struct Options {
    UnevenDivisor divisor = UnevenDivisor::kAllRanks;
    std::optional<Batch> stand_in = {};
  };

  UnevenBatches(const torch::nn::Module& model, Range& range, Options options = Options())
      : rounds_(model, options.divisor), range_(range), options_(std::move(options)) {}

  /// Whether the batch is one of this rank's own: what a metric should count.
  bool has_input() const { return has_input_; }
  /// How many ranks have one of their own.
  int64_t ranks_with_input() const { return ranks_with_input_; }

  struct End {};
  class Iterator {
   public:
    explicit Iterator(UnevenBatches& batches) : batches_(&batches) {}
    ~Iterator() { batches_->rounds_.end(); } // a loop that the ranks left early ends its rounds as well
    Iterator(const Iterator&) = delete;
    Iterator& operator=(const Iterator&) = delete;
    Batch& operator*() const { return *batches_->batch_; }
    Iterator& operator++() {
      if (batches_->has_input_) ++*batches_->at_;
      batches_->next();
      return *this;
    }
    bool operator==(End) const { return batches_->ranks_with_input_ == 0; }

   private:
    UnevenBatches* batches_;
  };

  Iterator begin() {
    at_.emplace(range_.begin());
    batch_.reset();
    next();
    return Iterator(*this);
  }
  End end() const { return {}; }

 private:
  void next() {
    has_input_ = *at_ != range_.end();
    if (has_input_) batch_ = **at_;
    if (!has_input_ && options_.stand_in) batch_ = options_.stand_in;
    ranks_with_input_ = rounds_.begin(has_input_, batch_.has_value());
  }

  internal::UnevenRounds rounds_;
  Range& range_;
  Options options_;
  std::optional<decltype(std::declval<Range&>().begin())> at_;
  std::optional<Batch> batch_;
  bool has_input_ = false;
  int64_t ranks_with_input_ = 0;
};

} // namespace tessera
