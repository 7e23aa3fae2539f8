#include <ATen/TensorOperators.h>
#include <ATen/ceil_div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include <tessera/collectives/continued_work.h>
#include <tessera/fsdp/communication.h>
#include <tessera/fsdp/communication/reduction_message.h>

namespace tessera {

namespace internal {

namespace {

std::string describe_codec(const BlockCodec& codec) {
  return fmt::format("{} in blocks of {}", to_string(codec.wire), codec.block);
}

/// The messages of one stage, and what its codes have lacked.
struct StageMessages {
  ReductionMessages messages;
  int64_t numel; ///< of the input
  c10::Device device;
  ReductionMessage sent = {};                               ///< all of them, one after another
  std::vector<int64_t> input_bytes = {}, output_bytes = {}; ///< by the other rank
  ReductionMessage received = {};                           ///< of one rank
  std::vector<ReductionMessage> gathered = {};              ///< of an all-reduce, one of each rank
  int64_t gathered_bytes = 0;                               ///< of the largest
  at::Tensor residual = {}, result_residual = {};
};

void append_message(ReductionMessage& all, const ReductionMessage& next) {
  all.raw.insert(all.raw.end(), next.raw.begin(), next.raw.end());
  all.coded.insert(all.coded.end(), next.coded.begin(), next.coded.end());
  all.parameters.insert(all.parameters.end(), next.parameters.begin(), next.parameters.end());
  all.bytes += next.bytes;
}

class QuantizedReductionExtension final : public ReductionExtension,
                                          public std::enable_shared_from_this<QuantizedReductionExtension> {
 public:
  QuantizedReductionExtension(const QuantizedReduction& settings, std::shared_ptr<const GradientLayout> layout,
                              const std::vector<ReductionStage>& stages)
      : settings_(settings), layout_(std::move(layout)) {
    for (const auto& sizes : layout_->sizes)
      is_coded_.push_back(sizes.size() > 1 && c10::multiply_integers(sizes) >= settings.smallest);
    for (const auto& stage : stages) stages_.push_back(make_stage(stage, stages.size()));
  }

  Work reduce(const Reduction& reduction) override {
    auto& own = stages_.at(reduction.stage.number);
    const auto bytes = at::TensorOptions(at::kByte).device(reduction.input.device());
    const auto sent = at::empty({own.sent.bytes}, bytes);
    own.messages.write(own.sent, reduction.input, sent, residual_of(own), reduction.input);
    int64_t begin = 0;
    for (const int64_t size : own.input_bytes) {
      own.messages.write_flags(reduction.input, sent, begin);
      begin += size;
    }
    auto& ranks = *reduction.stage.communicator;
    const auto received = at::empty({own.received.bytes * ranks.size()}, bytes);
    auto work = ranks.all_to_all(received, sent, own.output_bytes, own.input_bytes, reduction.label);
    return then(std::move(work), [self = shared_from_this(), &own, reduction, received, sent] {
      self->finish(own, reduction, received); // what was sent is kept until it has arrived
    });
  }

  int64_t payload(const ReductionStage& stage) const override {
    const auto& own = stages_.at(stage.number);
    const int64_t exchanged = std::max(own.sent.bytes, own.received.bytes * stage.communicator->size());
    return exchanged + own.gathered_bytes * static_cast<int64_t>(own.gathered.size());
  }

  int64_t state_bytes() const override {
    int64_t numel = 0;
    for (const auto& own : stages_) numel += own.numel + (own.gathered.empty() ? 0 : layout_->chunk_numel);
    return settings_.error_feedback ? numel * static_cast<int64_t>(sizeof(float)) : 0;
  }

  std::vector<std::pair<std::string, at::Tensor>> state() override {
    std::vector<std::pair<std::string, at::Tensor>> tensors;
    if (!settings_.error_feedback) return tensors;
    for (size_t number = 0; number < stages_.size(); ++number) {
      auto& own = stages_[number];
      tensors.emplace_back(fmt::format("residual_{}", number), residual_of(own));
      if (!own.gathered.empty()) tensors.emplace_back(fmt::format("result_residual_{}", number), result_residual_of(own));
    }
    return tensors;
  }

 private:
  StageMessages make_stage(const ReductionStage& stage, size_t stages) const {
    const bool is_inside = settings_.inner && stage.number == 0 && stages > 1;
    const int64_t ranks = stage.communicator->size(), rank = stage.communicator->rank();
    const bool reduces_all = stage.kind == ReductionStage::Kind::kAllReduce;
    const int64_t chunks = reduces_all ? 1 : stage.chunks / ranks;
    StageMessages made{.messages = {layout_, is_inside ? *settings_.inner : settings_.codec, is_coded_},
                       .numel = stage.chunks * layout_->chunk_numel,
                       .device = stage.communicator->device_type()};
    for (int64_t to = 0; to < ranks; ++to) {
      const auto message = reduces_all ? made.messages.of_part(stage.first_chunk, to, ranks)
                                       : made.messages.of_chunks(stage.first_chunk + to * chunks, chunks);
      if (to == rank) made.received = message;
      made.input_bytes.push_back(message.bytes);
      append_message(made.sent, message.moved(reduces_all ? 0 : to * chunks * layout_->chunk_numel, made.sent.bytes));
      if (!reduces_all) continue;
      made.gathered.push_back(message);
      made.gathered_bytes = std::max(made.gathered_bytes, message.bytes);
    }
    made.output_bytes.assign(static_cast<size_t>(ranks), made.received.bytes);
    return made;
  }

  /// Adds up what the ranks have sent, and has the others get it where all are to.
  void finish(StageMessages& own, const Reduction& reduction, const at::Tensor& received) const {
    const auto& output = reduction.output;
    const bool is_wide = output.scalar_type() == at::kFloat || output.scalar_type() == at::kDouble;
    const auto sums = is_wide ? output : at::empty(output.sizes(), output.options().dtype(at::kFloat));
    const int64_t ranks = reduction.stage.communicator->size();
    const auto by_rank = received.view({ranks, own.received.bytes});
    for (int64_t rank = 0; rank < ranks; ++rank)
      own.messages.read(own.received, by_rank[rank], sums, rank == 0 ? DecodeInto::kWrite : DecodeInto::kAdd);
    if (reduction.op == ReduceOp::kAvg) {
      for (const auto* ranges : {&own.received.raw, &own.received.coded}) {
        for (const auto& range : *ranges) sums.narrow(0, range.first, range.numel).div_(ranks);
      }
    }
    if (own.gathered.empty() && !is_wide) output.copy_(sums);
    own.messages.read_flags(by_rank, output);
    if (!own.gathered.empty()) gather(own, reduction, sums);
  }

  void gather(StageMessages& own, const Reduction& reduction, const at::Tensor& sums) const {
    auto& ranks = *reduction.stage.communicator;
    const auto all = at::empty({ranks.size(), own.gathered_bytes}, at::TensorOptions(at::kByte).device(sums.device()));
    const auto mine = all[ranks.rank()];
    const auto residual = settings_.error_feedback ? result_residual_of(own) : at::Tensor();
    own.messages.write(own.received, sums, mine, residual, reduction.output);
    ranks.all_gather_into(all.view({-1}), mine, reduction.label).wait();
    for (size_t rank = 0; rank < own.gathered.size(); ++rank)
      own.messages.read(own.gathered[rank], all[static_cast<int64_t>(rank)], reduction.output, DecodeInto::kWrite);
  }

  at::Tensor residual_of(StageMessages& own) const {
    if (settings_.error_feedback && !own.residual.defined())
      own.residual = at::zeros({own.numel}, at::TensorOptions(at::kFloat).device(own.device));
    return own.residual;
  }

  at::Tensor result_residual_of(StageMessages& own) const {
    if (!own.result_residual.defined())
      own.result_residual = at::zeros({layout_->chunk_numel}, at::TensorOptions(at::kFloat).device(own.device));
    return own.result_residual;
  }

  QuantizedReduction settings_;
  std::shared_ptr<const GradientLayout> layout_;
  std::vector<bool> is_coded_;        // by parameter
  std::vector<StageMessages> stages_; // by their numbers
};

class QuantizedReductionPolicy final : public ReductionPolicy {
 public:
  explicit QuantizedReductionPolicy(const QuantizedReduction& settings) : settings_(settings) {}

  std::string description() const override {
    return fmt::format("{}{}, from {} elements on{}", describe_codec(settings_.codec),
                       settings_.inner ? " (inside: " + describe_codec(*settings_.inner) + ")" : "", settings_.smallest,
                       settings_.error_feedback ? ", with error feedback" : "");
  }

  std::shared_ptr<ReductionExtension> make(const std::shared_ptr<const GradientLayout>& layout,
                                           const std::vector<ReductionStage>& stages) const override {
    return std::make_shared<QuantizedReductionExtension>(settings_, layout, stages);
  }

 private:
  QuantizedReduction settings_;
};

} // namespace

} // namespace internal

std::shared_ptr<const ReductionPolicy> quantized_reduction(const QuantizedReduction& settings) {
  check_codec(settings.codec, "quantized_reduction");
  if (settings.inner) check_codec(*settings.inner, "quantized_reduction: the inner codec");
  TORCH_CHECK_VALUE(settings.smallest >= 0, "quantized_reduction: smallest is ", settings.smallest, ", but cannot be negative");
  return std::make_shared<internal::QuantizedReductionPolicy>(settings);
}

} // namespace tessera
