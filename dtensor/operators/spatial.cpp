#include <ATen/core/dispatch/Dispatcher.h>
#include <absl/algorithm/container.h>

#include <tessera/dtensor/rules/factors.h>
#include <tessera/dtensor/rules/patterns.h>

namespace tessera::internal::rules {

namespace {

/// Pooling, padding and sampling: images are whole, everything before them is a batch.
constexpr PatternLine kImages[] = {
    {"avg_pool2d _adaptive_avg_pool2d reflection_pad2d replication_pad2d", "...**->...**"},
    {"avg_pool3d _adaptive_avg_pool3d reflection_pad3d replication_pad3d", "...***->...***"},
    {"reflection_pad1d replication_pad1d", "...*->...*"},
    {"reflection_pad1d_backward replication_pad1d_backward", "...*,...*->...*"},
    {"avg_pool2d_backward _adaptive_avg_pool2d_backward reflection_pad2d_backward replication_pad2d_backward",
     "...**,...**->...**"},
    {"avg_pool3d_backward _adaptive_avg_pool3d_backward reflection_pad3d_backward replication_pad3d_backward",
     "...***,...***->...***"},
    {"max_pool2d_with_indices adaptive_max_pool2d", "...**->...**,...**"},
    {"max_pool3d_with_indices adaptive_max_pool3d", "...***->...***,...***"},
    {"max_pool2d_with_indices_backward adaptive_max_pool2d_backward", "...**,...**,...**->...**"},
    {"max_pool3d_with_indices_backward adaptive_max_pool3d_backward", "...***,...***,...***->...***"},
    {"max_unpool2d", "...**,...**->...**"},
    {"max_unpool3d", "...***,...***->...***"},
    {"fractional_max_pool2d", "nc**,nc*->nc**,nc**"},
    {"fractional_max_pool3d", "nc***,nc*->nc***,nc***"},
    {"fractional_max_pool2d_backward", "...**,...**,...**->...**"},
    {"fractional_max_pool3d_backward", "...***,...***,...***->...***"},
    {"pixel_shuffle pixel_unshuffle", "...***->...***"},
    {"channel_shuffle", "n*~->n*~"},
    {"grid_sampler_2d cudnn_grid_sampler", "n***,n***->n***"},
    {"grid_sampler_2d_backward cudnn_grid_sampler_backward", "n***,n***,n***->n***,n***"},
    {"grid_sampler_3d", "n****,n****->n****"},
    {"grid_sampler_3d_backward", "n****,n****,n****->n****,n****"},
    {"upsample_nearest1d. _upsample_nearest_exact1d. upsample_linear1d. upsample_nearest2d. _upsample_nearest_exact2d. "
     "upsample_bilinear2d. upsample_bicubic2d. upsample_nearest3d. _upsample_nearest_exact3d. upsample_trilinear3d. "
     "_upsample_bilinear2d_aa. _upsample_bicubic2d_aa.",
     "nc~->nc~"},
};

/// The sizes of the input that a backward gets as a number list are those of this rank's part.
void sized_local(const LocalCall& call) {
  for (const auto* name : {"input_size", "input_sizes"}) {
    auto* sizes = call.find(name);
    if (sizes && !call.outputs.empty()) *sizes = call.outputs[0].local_sizes;
  }
  call.op.callBoxed(*call.stack);
}

/// Kernels refuse tensors without channels: they are split evenly or not at all. The batch is the first factor.
Factorization even_channels(Factorization factors) {
  for (size_t f = 1; f < factors.factors.size(); ++f) factors.factors[f].limit = SplitLimit::kEven;
  return factors;
}

bool grouped(const OpCall& call) { return call.integer("groups", 1) != 1; }

/// input [n, k, …], weight [o, k, …] (the other way round when transposed), bias [o].
Factorization convolution(const OpCall& call) {
  const bool bias = call.tensors.size() > 2 && call.tensors[2].defined;
  const bool transposed = call.flag("transposed", false);
  if (grouped(call)) return pattern_factors(call, "n*~,**~,*->n*~");
  auto factors = even_channels(pattern_factors(call, transposed ? "nk~,ko~,o->no~" : "nk~,ok~,o->no~", bias ? "" : "k"));
  if (!bias) factors.partial = {flow({0}, kLinearOps), flow({1}, kLinearOps)};
  return factors;
}

/// The sums over the batch, and over the output channels, of what each rank finds.
Factorization convolution_backward(const OpCall& call) {
  const bool transposed = call.flag("transposed", false);
  const bool without_channels = call.tensors[1].sizes[1] == 0; // whose result PyTorch gives no channels either
  auto factors = grouped(call) || without_channels
                     ? pattern_factors(call, "n*~,n*~,**~->n*~,**~,*", "n")
                     : pattern_factors(call, transposed ? "no~,nk~,ko~->nk~,ko~,o" : "no~,nk~,ok~->nk~,ok~,o", "no");
  factors.partial.push_back(flow({0}, kLinearOps));
  return even_channels(std::move(factors));
}

Factorization output_like_input(const OpCall& call, const char* pattern) {
  auto factors = pattern_factors(call, pattern);
  factors.partial.push_back(flow({0}, kLinearOps));
  return factors;
}

/// Sliding blocks: the channels mix with the places.
Factorization blocks(const OpCall& call) {
  const bool forward = call.name.find("im2col") != std::string::npos;
  const bool batched = call.tensors[0].sizes.size() == (forward ? 4 : 3);
  return batched ? output_like_input(call, forward ? "n***->n**" : "n**->n***") : whole_factors(call);
}

void convolution_backward_local(const LocalCall& call) {
  auto* bias = call.find("bias_sizes");
  const bool has_bias = bias && !bias->isNone() && call.outputs.size() > 2;
  const bool is_split = has_bias && !absl::c_linear_search(call.outputs[2].local_sizes, kUnknownSize);
  if (is_split) *bias = call.outputs[2].local_sizes;
  call.op.callBoxed(*call.stack);
}

} // namespace

void register_spatial(Registry& registry) {
  add_patterns(registry, kImages);
  registry.add(
      "upsample_nearest1d_backward. _upsample_nearest_exact1d_backward. upsample_linear1d_backward. upsample_nearest2d_backward. "
      "_upsample_nearest_exact2d_backward. upsample_bilinear2d_backward. upsample_bicubic2d_backward. "
      "upsample_nearest3d_backward. _upsample_nearest_exact3d_backward. upsample_trilinear3d_backward. "
      "_upsample_bilinear2d_aa_backward. _upsample_bicubic2d_aa_backward.",
      OnLocals([](const OpCall& call) { return output_like_input(call, "nc~->nc~"); }).run(sized_local));
  registry.add("im2col col2im", OnLocals(blocks));
  registry.add("convolution convolution_overrideable", OnLocals(convolution));
  registry.add("convolution_backward convolution_backward_overrideable",
               OnLocals(convolution_backward).run(convolution_backward_local).with(Trait::kOwnEmptyShapes));
}

} // namespace tessera::internal::rules
