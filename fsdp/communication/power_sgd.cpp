#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include <tessera/collectives/continued_work.h>
#include <tessera/fsdp/communication.h>
#include <tessera/fsdp/communication/reduction_message.h>

namespace tessera {

namespace internal {

namespace {

/// A piece of a chunk that is sent as two matrices.
struct LowRankPiece {
  size_t parameter;
  int64_t offset, rows, columns, rank;
  int64_t q; ///< where its Q begins among all
};

/// Makes the columns orthonormal, one after another (modified Gram-Schmidt). Of columns that nearly depend on each other one pass
/// leaves a part of the ones before, which a second pass takes away.
void orthogonalize_once(const at::Tensor& matrix) {
  constexpr double kSmallest = 1e-30;
  for (int64_t i = 0; i < matrix.size(1); ++i) {
    const auto column = matrix.narrow(1, i, 1);
    column.div_(column.norm().clamp_min(kSmallest));
    if (const int64_t rest = matrix.size(1) - i - 1; rest > 0) {
      const auto after = matrix.narrow(1, i + 1, rest);
      after.sub_(at::mm(column, at::mm(column.t(), after)));
    }
  }
}

void orthogonalize(const at::Tensor& matrix) {
  orthogonalize_once(matrix);
  orthogonalize_once(matrix);
}

/// The steps are those of the paper. M = gradient + error; P = M Q; the mean of P; its columns orthonormal; Q = Mᵀ P; the mean
/// of Q; the result P Qᵀ; error = M - P Qᵀ. Q is kept for the next step. Of a parameter that this rank does not use, M is 0: the
/// error waits, since no gradient would get it where no rank uses it.
class PowerSGDExtension final : public ReductionExtension, public std::enable_shared_from_this<PowerSGDExtension> {
 public:
  PowerSGDExtension(const PowerSGD& settings, std::shared_ptr<const GradientLayout> layout,
                    const std::vector<ReductionStage>& stages)
      : settings_(settings), layout_(std::move(layout)) {
    const auto last = std::find_if(stages.begin(), stages.end(),
                                   [](const auto& stage) { return stage.kind == ReductionStage::Kind::kAllReduce; });
    if (last == stages.end()) return;
    const auto numel = make_pieces(layout_->chunks[static_cast<size_t>(last->first_chunk)]);
    const auto wide = layout_->dtype == at::kDouble ? at::kDouble : at::kFloat;
    options_ = at::TensorOptions(wide).device(last->communicator->device_type());
    auto generator = at::make_generator<at::CPUGeneratorImpl>(settings_.seed);
    first_q_ = at::randn({numel}, generator, at::TensorOptions(wide)).to(options_);
  }

  Work reduce(const Reduction& reduction) override {
    auto& ranks = *reduction.stage.communicator;
    if (reduction.stage.kind == ReductionStage::Kind::kReduceScatter)
      return ranks.reduce_scatter(reduction.output, reduction.input, reduction.op, reduction.label);
    allocate();
    if (steps_.item<int64_t>() < settings_.start_after || low_rank_.empty()) {
      steps_.add_(1);
      return ranks.all_reduce(reduction.output, reduction.op, reduction.label);
    }
    steps_.add_(1);
    const auto first = start(reduction.input);
    auto work = ranks.all_reduce(first, reduction.op, reduction.label);
    return then(std::move(work), [self = shared_from_this(), reduction, first] { self->finish(reduction, first); });
  }

  int64_t payload(const ReductionStage& stage) const override {
    const bool is_plain = stage.kind == ReductionStage::Kind::kReduceScatter || low_rank_.empty();
    if (is_plain) return stage.chunks * layout_->chunk_numel * static_cast<int64_t>(c10::elementSize(layout_->dtype));
    int64_t numel = as_it_is_numel_;
    for (const auto& piece : low_rank_) numel += (piece.rows + piece.columns) * piece.rank;
    return numel * static_cast<int64_t>(options_.dtype().itemsize());
  }

  int64_t state_bytes() const override { // Q twice: as it began, and as it is
    if (!first_q_.defined()) return 0;
    return (layout_->chunk_numel + 2 * first_q_.numel()) * static_cast<int64_t>(options_.dtype().itemsize());
  }

  std::vector<std::pair<std::string, at::Tensor>> state() override {
    allocate();
    if (!steps_.defined()) return {};
    return {{"error", error_}, {"q", q_}, {"steps", steps_}};
  }

 private:
  /// Sorts the pieces of this rank's chunk. Returns how many numbers all Q have, with room for the pieces of any chunk.
  int64_t make_pieces(const std::vector<GradientPiece>& pieces) {
    std::vector<int64_t> columns(layout_->names.size()), begins;
    for (const auto& chunk : layout_->chunks) {
      for (const auto& piece : chunk) columns[piece.parameter] = std::max(columns[piece.parameter], columns_of(piece));
    }
    int64_t end = 0;
    for (const int64_t each : columns) begins.push_back(std::exchange(end, end + each * settings_.rank));
    for (const auto& piece : pieces) {
      const int64_t width = columns_of(piece), rows = width == 0 ? 0 : piece.numel() / width;
      const int64_t rank = std::min({settings_.rank, rows, width});
      if (rank > 0 && 2 * (rows + width) * rank < rows * width) {
        low_rank_.push_back({piece.parameter, piece.offset, rows, width, rank, begins[piece.parameter]});
      } else {
        as_it_is_.emplace_back(piece.offset, piece.numel());
      }
    }
    as_it_is_.emplace_back(layout_->flags, static_cast<int64_t>(layout_->names.size()));
    for (const auto& [offset, numel] : as_it_is_) as_it_is_numel_ += numel;
    return end;
  }

  /// 0 for what is no matrix.
  static int64_t columns_of(const GradientPiece& piece) {
    return piece.sizes.size() < 2 || piece.sizes[0] == 0 ? 0 : piece.numel() / piece.sizes[0];
  }

  void allocate() {
    if (steps_.defined() || !first_q_.defined()) return;
    error_ = at::zeros({layout_->chunk_numel}, options_);
    q_ = first_q_.clone();
    steps_ = at::zeros({1}, at::TensorOptions(at::kLong));
  }

  static at::Tensor matrix_of(const at::Tensor& flat, int64_t offset, int64_t rows, int64_t columns) {
    return flat.narrow(0, offset, rows * columns).view({rows, columns});
  }
  /// 1 or 0, where the gradients are: the host would wait for a device to tell it.
  at::Tensor is_used(const LowRankPiece& piece) const { return used_.select(0, static_cast<int64_t>(piece.parameter)); }
  at::Tensor q_of(const at::Tensor& all, const LowRankPiece& piece) const {
    return matrix_of(all, piece.q, piece.columns, piece.rank);
  }

  /// All P, and what is sent as it is, in one tensor.
  at::Tensor start(const at::Tensor& gradients) {
    std::vector<at::Tensor> parts;
    m_ = error_.clone();
    used_ = gradients.narrow(0, layout_->flags, static_cast<int64_t>(layout_->names.size())).ne(0).to(options_.dtype());
    for (const auto& piece : low_rank_) {
      const auto m = matrix_of(m_, piece.offset, piece.rows, piece.columns);
      m.mul_(is_used(piece)).add_(matrix_of(gradients, piece.offset, piece.rows, piece.columns));
      parts.push_back(at::mm(m, q_of(q_, piece)).view({-1}));
    }
    for (const auto& [offset, numel] : as_it_is_) parts.push_back(gradients.narrow(0, offset, numel).to(options_.dtype()));
    return at::cat(parts);
  }

  /// `first` is the mean or the sum of what `start` made.
  void finish(const Reduction& reduction, const at::Tensor& first) {
    std::vector<at::Tensor> ps, qs;
    int64_t at = 0;
    for (const auto& piece : low_rank_) {
      ps.push_back(matrix_of(first, at, piece.rows, piece.rank));
      at += piece.rows * piece.rank;
      orthogonalize(ps.back());
      qs.push_back(at::mm(matrix_of(m_, piece.offset, piece.rows, piece.columns).t(), ps.back()).view({-1}));
    }
    for (const auto& [offset, numel] : as_it_is_) {
      reduction.output.narrow(0, offset, numel).copy_(first.narrow(0, at, numel));
      at += numel;
    }
    const auto second = at::cat(qs);
    auto& ranks = *reduction.stage.communicator;
    ranks.all_reduce(second, reduction.op, reduction.label).wait();
    at = 0;
    for (size_t i = 0; i < low_rank_.size(); ++i) {
      const auto& piece = low_rank_[i];
      deliver(piece, reduction, ps[i], matrix_of(second, at, piece.columns, piece.rank));
      at += piece.columns * piece.rank;
    }
    m_ = used_ = at::Tensor();
  }

  /// Where the result is not finite, the step is skipped: the error is the one of before. A column of Q without a direction
  /// begins anew.
  void deliver(const LowRankPiece& piece, const Reduction& reduction, const at::Tensor& p, const at::Tensor& q) const {
    const auto result = at::mm(p, q.t());
    matrix_of(reduction.output, piece.offset, piece.rows, piece.columns).copy_(result);
    const double share = reduction.op == ReduceOp::kSum ? 1.0 / reduction.stage.communicator->size() : 1;
    const auto m = matrix_of(m_, piece.offset, piece.rows, piece.columns);
    const auto error = matrix_of(error_, piece.offset, piece.rows, piece.columns);
    auto left = m.sub(result, share);
    left.addcmul_(error, is_used(piece).neg().add_(1));
    error.copy_(at::where(result.isfinite().all(), left, error));
    const auto norms = q.square().sum({0}, /*keepdim=*/true);
    q_of(q_, piece).copy_(at::where(norms.isfinite().logical_and(norms.gt(0)), q, q_of(first_q_, piece)));
  }

  PowerSGD settings_;
  std::shared_ptr<const GradientLayout> layout_;
  std::vector<LowRankPiece> low_rank_;
  std::vector<std::pair<int64_t, int64_t>> as_it_is_; // offset and elements
  int64_t as_it_is_numel_ = 0;
  at::TensorOptions options_;
  at::Tensor first_q_, q_, error_; // undefined before they are needed
  at::Tensor m_;                   // of the reduction that runs
  at::Tensor used_;                // of it: 1 for each parameter that this rank uses, otherwise 0
  at::Tensor steps_;               // on the CPU
};

class PowerSGDPolicy final : public ReductionPolicy {
 public:
  explicit PowerSGDPolicy(const PowerSGD& settings) : settings_(settings) {}

  std::string description() const override {
    return fmt::format("PowerSGD of rank {} after {} steps, seed {}", settings_.rank, settings_.start_after, settings_.seed);
  }

  void check(const std::vector<ReductionStage>& stages) const override {
    const auto reduces_all = [](const auto& stage) { return stage.kind == ReductionStage::Kind::kAllReduce; };
    TORCH_CHECK_VALUE(
        stages.empty() || std::any_of(stages.begin(), stages.end(), reduces_all),
        "fully_shard: PowerSGD is for all-reduces, and the strategy has none: take no-shard (replicate), or hybrid, "
        "on a mesh with a replicate dim of more than one rank");
  }

  std::shared_ptr<ReductionExtension> make(const std::shared_ptr<const GradientLayout>& layout,
                                           const std::vector<ReductionStage>& stages) const override {
    return std::make_shared<PowerSGDExtension>(settings_, layout, stages);
  }

 private:
  PowerSGD settings_;
};

} // namespace

} // namespace internal

std::shared_ptr<const ReductionPolicy> power_sgd(const PowerSGD& settings) {
  TORCH_CHECK_VALUE(settings.rank >= 1, "power_sgd: the rank is ", settings.rank, ", but must be positive");
  TORCH_CHECK_VALUE(settings.start_after >= 0, "power_sgd: start_after is ", settings.start_after, ", but cannot be negative");
  return std::make_shared<internal::PowerSGDPolicy>(settings);
}

} // namespace tessera
