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

/// What the gradients of a step are divided by if some ranks have no input left.
enum class UnevenDivisor {
  kAllRanks, ///< the number of all ranks, as in any other step: ranks without input count as zero
  /// The number of ranks that have input. An error, on every rank, if the gradients of some group are divided by another number
  /// than the model's ranks: an expert on its own mesh, or a group with a `set_gradient_divide_factor`. With the number of the
  /// model's ranks as its factor, an expert's gradients are divided like the others.
  kRanksWithInput,
};

namespace internal {

/// What a rank computes with in a round.
enum class BatchSource {
  kOwn,     ///< a batch of its own
  kStandIn, ///< its last one again, or what stands in for it
  kNone     ///< neither: it never had one
};

/// The agreements of a model's ranks on who has input left.
class UnevenRounds {
 public:
  UnevenRounds(const torch::nn::Module& model, UnevenDivisor divisor);
  ~UnevenRounds() { end(); }
  UnevenRounds(const UnevenRounds&) = delete;
  UnevenRounds& operator=(const UnevenRounds&) = delete;

  /// How many ranks have a batch of their own; 0 ends the rounds. An error on all ranks where one has `kNone` while others have
  /// one, or a group that `divisor` does not fit.
  int64_t begin(BatchSource source);
  /// Gives the gradients the weight that they have without these rounds.
  void end();

 private:
  std::string divided_otherwise() const;

  std::optional<FSDPModule> model_; ///< none: the model is not sharded, and runs alone
  UnevenDivisor divisor_;
  CommunicatorPtr communicator_; ///< null on one rank
};

} // namespace internal

/// The batches of this rank, for ranks with different numbers of batches. A rank without input takes part until no rank has input
/// (PyTorch: `Join`).
///
/// ```cpp
/// tessera::UnevenBatches batches(*model, *loader);
/// for (auto& batch : batches) { loss(*model, batch).backward(); optimizer.step(); … }   // the same on every rank
/// ```
///
/// A rank without input gets its last batch again, or `stand_in`, and runs forward and backward like the others. Its gradients of
/// sharded parameters count as zero, even if they are NaN. Other effects of the batch remain: the loss, buffers (BatchNorm's
/// statistics), gradients of parameters that are not sharded, and communication of the model in forward, for example in a
/// synchronized BatchNorm. An empty batch as `stand_in` avoids these effects. A rank that never had a batch needs a `stand_in`.
/// If loops overlap, for example with an evaluation inside, the loop that began last applies until it ends.
///
/// All ranks of the model iterate, once in each step. A step costs one all-reduce of three numbers. `range` is anything with
/// `begin` and `end`, such as a DataLoader, and is iterated once for each `begin` of this object. With a model that is not
/// sharded it is a plain loop. A model that only contains sharded modules is an error, and so is one that trains parameters of
/// another model.
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
  /// The number of ranks that have a batch of their own.
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
    using internal::BatchSource;
    has_input_ = *at_ != range_.end();
    if (has_input_) batch_ = **at_;
    if (!has_input_ && options_.stand_in) batch_ = options_.stand_in;
    const auto otherwise = batch_ ? BatchSource::kStandIn : BatchSource::kNone;
    ranks_with_input_ = rounds_.begin(has_input_ ? BatchSource::kOwn : otherwise);
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
