#include <tessera/optim/adamw_8bit.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <memory>
#include <utility>

#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/optim/kernels/dynamic_table.h>
#include <tessera/optim/kernels/eight_bit_kernel.h>
#include <tessera/optim/parts/check_options.h>
#include <tessera/optim/parts/fused_lists.h>
#include <tessera/optim/parts/shared_sums.h>
#include <tessera/optim/parts/stepped.h>
#include <tessera/optim/register_optimizer.h>

namespace tessera {

namespace {

using EightBitEntry = internal::Stepped<AdamW8bitParamState, AdamW8bitOptions>;
using internal::Box;
using internal::part_of;

constexpr int kBlockBits = internal::kEightBitBlockBits;
constexpr int64_t kSliceBytes = 16L << 20; ///< of float that a step computes with at once

const AdamW8bitOptions& checked(const AdamW8bitOptions& options) {
  internal::check_not_negative("AdamW8bit", "lr", options.lr());
  internal::check_not_negative("AdamW8bit", "eps", options.eps());
  internal::check_not_negative("AdamW8bit", "weight_decay", options.weight_decay());
  internal::check_betas("AdamW8bit", "betas", options.betas());
  return options;
}

void register_adamw_8bit() {
  [[maybe_unused]] static const bool done = [] {
    using State = AdamW8bitParamState;
    using Options = AdamW8bitOptions;
    register_optimizer<AdamW8bit, State, Options>("AdamW8bit",
                                                  {{"step", &State::step},
                                                   {"exp_avg", &State::exp_avg},
                                                   {"exp_avg_sq", &State::exp_avg_sq},
                                                   {"exp_avg_absmax", &State::exp_avg_absmax, StateLayout::kReplicated},
                                                   {"exp_avg_sq_absmax", &State::exp_avg_sq_absmax, StateLayout::kReplicated}},
                                                  {{"lr", &Options::lr},
                                                   {"betas", &Options::betas},
                                                   {"eps", &Options::eps},
                                                   {"weight_decay", &Options::weight_decay},
                                                   {"min_8bit_size", &Options::min_8bit_size}});
    return true;
  }();
}

int64_t blocks_of(const at::Tensor& parameter) { return (parameter.numel() + (1 << kBlockBits) - 1) >> kBlockBits; }

void prepare(const EightBitEntry& entry) {
  auto& state = *entry.state;
  state.step(state.step() + 1);
  if (state.exp_avg().defined()) return;
  const bool is_small = entry.parameter.numel() < entry.options->min_8bit_size();
  const auto dtype = is_small ? entry.parameter.scalar_type() : at::kByte;
  state.exp_avg(internal::zeros_as(entry.parameter, dtype));
  state.exp_avg_sq(internal::zeros_as(entry.parameter, dtype));
  if (is_small) return;
  state.exp_avg_absmax(internal::replicated_zeros(entry.parameter, {blocks_of(entry.parameter)}, at::kFloat));
  state.exp_avg_sq_absmax(internal::replicated_zeros(entry.parameter, {blocks_of(entry.parameter)}, at::kFloat));
}

/// A piece of this rank's part that is computed at once.
struct Slice {
  at::Tensor blocks; ///< the number of each element's block, flat
  at::Tensor gradient, codes, squared_codes, update;
};

/// The numbers of the blocks that a box's elements lie in.
at::Tensor blocks_in(const Box& box, const std::vector<int64_t>& sizes, c10::Device device) {
  auto positions = at::zeros({}, at::TensorOptions(at::kLong).device(device));
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    std::vector<int64_t> shape(sizes.size(), 1);
    shape[d] = box.sizes[d];
    const auto along = at::arange(box.offsets[d], box.offsets[d] + box.sizes[d], positions.options()).mul_(stride);
    positions = positions + along.view(shape);
    stride *= sizes[d];
  }
  return positions.bitwise_right_shift(kBlockBits).reshape({-1});
}

/// Box `inner` of a tensor, as a box of `outer`, which contains it.
Box within(Box inner, const Box& outer) {
  for (size_t d = 0; d < inner.offsets.size(); ++d) inner.offsets[d] -= outer.offsets[d];
  return inner;
}

/// Visits the pieces of this rank's part. `update` is what the parameter's part is to add; it may be undefined.
template <typename Visit> // void(const Slice&)
void for_each_slice(const EightBitEntry& entry, const at::Tensor& update, const Visit& visit) {
  const auto gradient = part_of(entry.gradient).contiguous();
  const auto gradients = internal::pieces_like(entry.gradient, gradient);
  const auto codes = internal::pieces_like(entry.gradient, part_of(entry.state->exp_avg()));
  const auto squared = internal::pieces_like(entry.gradient, part_of(entry.state->exp_avg_sq()));
  const auto updates = internal::pieces_like(entry.gradient, update.defined() ? update : gradient);
  for (size_t i = 0; i < gradients.size(); ++i) {
    const auto& whole = gradients[i].box;
    for (const auto& box : internal::split(whole, sizeof(float), kSliceBytes)) {
      const auto part = [&](const internal::Piece& piece) { return internal::narrow(piece.data, within(box, whole)); };
      visit(Slice{.blocks = blocks_in(box, entry.parameter.sizes().vec(), gradient.device()),
                  .gradient = part(gradients[i]),
                  .codes = part(codes[i]),
                  .squared_codes = part(squared[i]),
                  .update = part(updates[i])});
    }
  }
}

struct Moments {
  at::Tensor average, square; ///< float
};

/// The moments of a slice after this step's gradient, from the codes of before.
Moments new_moments(const EightBitEntry& entry, const Slice& slice) {
  const auto [beta1, beta2] = entry.options->betas();
  const auto gradient = slice.gradient.to(at::kFloat);
  const auto scaled = [&](const at::Tensor& codes, bool is_signed, const at::Tensor& absmax) {
    return internal::dequantized(codes, is_signed).mul_(part_of(absmax).index_select(0, slice.blocks).view(codes.sizes()));
  };
  return {
      scaled(slice.codes, true, entry.state->exp_avg_absmax()).mul_(beta1).add_(gradient, 1 - beta1),
      scaled(slice.squared_codes, false, entry.state->exp_avg_sq_absmax()).mul_(beta2).addcmul_(gradient, gradient, 1 - beta2)};
}

internal::EightBitNumbers numbers_of(const EightBitEntry& entry) {
  const auto& options = *entry.options;
  const auto [beta1, beta2] = options.betas();
  return {.lr = options.lr(),
          .beta1 = beta1,
          .beta2 = beta2,
          .eps = options.eps(),
          .weight_decay = options.weight_decay(),
          .step = entry.state->step()};
}

/// A parameter's part that the kernel of the CPU steps. Where it does not lie row-major, a copy.
class OnHost {
 public:
  explicit OnHost(const EightBitEntry& entry)
      : part_(part_of(entry.parameter)),
        memory_{.parameter = part_.contiguous(),
                .gradient = part_of(entry.gradient).to(at::kFloat).contiguous(),
                .codes = part_of(entry.state->exp_avg()),
                .squared_codes = part_of(entry.state->exp_avg_sq()),
                .absmax = part_of(entry.state->exp_avg_absmax()),
                .squared_absmax = part_of(entry.state->exp_avg_sq_absmax())} {}
  OnHost(const OnHost&) = delete;
  OnHost& operator=(const OnHost&) = delete;
  ~OnHost() = default;

  static bool takes(const EightBitEntry& entry) {
    const auto part = part_of(entry.parameter);
    return part.is_cpu() && part.numel() > 0 && part_of(entry.state->exp_avg()).is_contiguous() &&
           part_of(entry.state->exp_avg_sq()).is_contiguous();
  }
  template <typename Step>
  void run(const Step& step) const {
    step(memory_);
    if (!memory_.parameter.is_same(part_)) part_.copy_(memory_.parameter);
  }

 private:
  const at::Tensor part_;
  const internal::EightBitMemory memory_;
};

/// The largest elements of the new moments in this rank's parts of the blocks: those of the averages, then those of the squares.
/// On the CPU, the step of what needs no other rank's has been taken.
at::Tensor own_absmax(const EightBitEntry& entry) {
  const auto blocks = blocks_of(entry.parameter);
  const auto largest = at::zeros({2, blocks}, part_of(entry.parameter).options().dtype(at::kFloat));
  if (OnHost::takes(entry)) {
    internal::announce_write(entry.parameter);
    OnHost(entry).run([&](const auto& memory) { begin_eight_bit_step(entry.parameter, memory, numbers_of(entry), largest); });
    return largest.view({-1});
  }
  for_each_slice(entry, {}, [&](const Slice& slice) {
    const auto moments = new_moments(entry, slice);
    largest[0].scatter_reduce_(0, slice.blocks, moments.average.abs().reshape({-1}), "amax");
    largest[1].scatter_reduce_(0, slice.blocks, moments.square.reshape({-1}), "amax");
  });
  return largest.view({-1});
}

/// The codes of a signed moment keep its sign.
at::Tensor signed_codes(const at::Tensor& relative) {
  const auto codes = internal::nearest_codes(relative, true).to(at::kInt);
  const auto is_negative = relative.lt(0), lost = internal::dequantized(codes, true).lt(0).ne(is_negative);
  return codes.add_(lost.to(at::kInt).mul_(is_negative.to(at::kInt).mul_(-2).add_(1))).to(at::kByte);
}

/// The root of floats, rounded to the nearest one, as CUDA's is and MKL's is not.
at::Tensor rounded_root(const at::Tensor& values) {
  return values.is_cuda() ? values.sqrt() : values.to(at::kDouble).sqrt_().to(at::kFloat);
}

/// Writes a slice's codes, and what its parameters are to add.
void write_slice(const EightBitEntry& entry, const Slice& slice, const at::Tensor& absmax) {
  const auto& options = *entry.options;
  const auto [beta1, beta2] = options.betas();
  const auto steps = static_cast<double>(entry.state->step());
  const auto moments = new_moments(entry, slice);
  const double root = std::sqrt(1 - std::pow(beta2, steps));
  const auto denominator = rounded_root(moments.square).div_(root).add_(options.eps());
  slice.update.copy_(moments.average.div(denominator).mul_(-options.lr() / (1 - std::pow(beta1, steps))));
  const auto relative = [&](const at::Tensor& moment, const at::Tensor& largest) {
    return moment.div(largest.index_select(0, slice.blocks).view(moment.sizes()).clamp_min_(1e-38));
  };
  slice.codes.copy_(signed_codes(relative(moments.average, absmax[0])));
  slice.squared_codes.copy_(internal::nearest_codes(relative(moments.square, absmax[1]), false));
}

/// Writes the codes, and the parameter.
void apply_slices(EightBitEntry& entry, const at::Tensor& largest) {
  const auto update = at::empty_like(part_of(entry.parameter), at::MemoryFormat::Contiguous);
  for_each_slice(entry, update, [&](const Slice& slice) { write_slice(entry, slice, largest); });
  if (entry.options->weight_decay() != 0) entry.parameter.mul_(1 - entry.options->lr() * entry.options->weight_decay());
  const auto* meta = internal::dtensor_meta(entry.parameter);
  entry.parameter.add_(meta ? internal::make_dtensor(update, meta->spec) : update);
}

/// Steps a parameter, given the largest elements of its blocks over all ranks.
void apply(EightBitEntry& entry, const at::Tensor& absmax) {
  auto& state = *entry.state;
  const auto largest = absmax.view({2, -1});
  if (OnHost::takes(entry)) {
    OnHost(entry).run([&](const auto& memory) { finish_eight_bit_step(entry.parameter, memory, numbers_of(entry), largest); });
  } else {
    apply_slices(entry, largest);
  }
  const auto keep = [](const at::Tensor& kept, const at::Tensor& values) {
    if (part_of(kept).numel() == values.numel()) part_of(kept).copy_(values); // a rank outside the mesh has none
  };
  keep(state.exp_avg_absmax(), largest[0]);
  keep(state.exp_avg_sq_absmax(), largest[1]);
}

void step_small(const EightBitEntry& entry) {
  const auto& options = *entry.options;
  const auto [beta1, beta2] = options.betas();
  internal::fused_adam_step(
      {{{entry.parameter, entry.gradient, entry.state->exp_avg(), entry.state->exp_avg_sq()}, entry.state->step()}},
      {.lr = options.lr(),
       .beta1 = beta1,
       .beta2 = beta2,
       .eps = options.eps(),
       .weight_decay = options.weight_decay(),
       .amsgrad = false,
       .decoupled = true});
}

} // namespace

AdamW8bit::AdamW8bit(const std::vector<torch::optim::OptimizerParamGroup>& groups, const AdamW8bitOptions& defaults)
    : ShardedOptimizer(groups, std::make_unique<AdamW8bitOptions>(checked(defaults))) {
  for (const auto& group : param_groups()) checked(static_cast<const AdamW8bitOptions&>(group.options()));
  register_adamw_8bit();
}

AdamW8bit::AdamW8bit(std::vector<at::Tensor> parameters, const AdamW8bitOptions& defaults)
    : AdamW8bit({torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults) {}

// The moments of a block that several ranks have are computed twice: once for its largest element, and once to be written. In
// between those of all parameters would take four times the memory of the state.
void AdamW8bit::update() {
  std::vector<EightBitEntry> entries;
  std::vector<internal::ShareOfSums> shares;
  for (auto& entry : internal::stepped_parameters<AdamW8bitParamState, AdamW8bitOptions>(*this)) {
    prepare(entry);
    if (!entry.state->exp_avg_absmax().defined()) {
      step_small(entry);
      continue;
    }
    shares.push_back({entry.parameter, own_absmax(entry)});
    entries.push_back(std::move(entry));
  }
  const auto largest = internal::shared_reduction(shares, ReduceOp::kMax, "the blocks of AdamW8bit");
  for (size_t i = 0; i < entries.size(); ++i) apply(entries[i], largest[i]);
}

} // namespace tessera
