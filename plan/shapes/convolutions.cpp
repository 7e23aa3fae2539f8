#include <tessera/plan/shapes/meta_library.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <vector>

namespace tessera::internal::shapes {

namespace {

/// What a convolution is called with, beside its tensors.
struct Geometry {
  IntArrayRef stride, padding, dilation, output_padding;
  bool transposed;
  int64_t groups;

  static int64_t at(IntArrayRef list, size_t dim) { return list[std::min(list.size() - 1, dim)]; }

  std::vector<int64_t> sizes(const Tensor& input, const Tensor& weight) const {
    std::vector<int64_t> result{input.size(0), transposed ? weight.size(1) * groups : weight.size(0)};
    for (int64_t d = 2; d < input.dim(); ++d) {
      const auto i = static_cast<size_t>(d - 2);
      const auto reach = at(dilation, i) * (weight.size(d) - 1) + 1; // of the kernel
      const auto size = transposed ? (input.size(d) - 1) * at(stride, i) - 2 * at(padding, i) + reach + at(output_padding, i)
                                   : (input.size(d) + 2 * at(padding, i) - reach) / at(stride, i) + 1;
      TORCH_CHECK_VALUE(size > 0, "convolution: an input of the shape ", input.sizes(),
                        " is smaller than what a weight of the shape ", weight.sizes(), " reaches");
      result.push_back(size);
    }
    return result;
  }
};

/// Channels are last where those of one side are.
at::MemoryFormat common_format(const Tensor& input, const Tensor& weight) {
  const auto last = input.dim() == 5 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast;
  const auto has = [&](const Tensor& tensor) { return tensor.suggest_memory_format() == last; };
  return (input.dim() == 4 || input.dim() == 5) && (has(input) || has(weight)) ? last : at::MemoryFormat::Contiguous;
}

Tensor convolution(const Tensor& input, const Tensor& weight, const MaybeTensor&, IntArrayRef stride, IntArrayRef padding,
                   IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups) {
  TORCH_CHECK_VALUE(input.dim() == weight.dim() && input.dim() > 2, "convolution: the input has the shape ", input.sizes(),
                    ", which a weight of the shape ", weight.sizes(), " does not fit");
  const auto channels = transposed ? weight.size(0) : weight.size(1) * groups;
  TORCH_CHECK_VALUE(input.size(1) == channels, "convolution: the input has ", input.size(1),
                    " channels, but the weight of the shape ", weight.sizes(), " takes ", channels);
  const Geometry geometry{stride, padding, dilation, output_padding, transposed, groups};
  return at::empty(geometry.sizes(input, weight), input.options(), common_format(input, weight));
}

Three convolution_backward(const Tensor&, const Tensor& input, const Tensor& weight, at::OptionalIntArrayRef bias, IntArrayRef,
                           IntArrayRef, IntArrayRef, bool, IntArrayRef, int64_t, std::array<bool, 3> wanted) {
  const auto like = [&](const Tensor& tensor) {
    return at::empty(tensor.sizes(), tensor.options(), common_format(input, weight));
  };
  return {wanted[0] ? like(input) : Tensor(), wanted[1] ? like(weight) : Tensor(),
          wanted[2] && bias ? empty_of(input, *bias) : Tensor()};
}

} // namespace

void add_convolutions(MetaLibrary& library) {
  library.add("convolution", convolution);
  library.add("convolution_backward", convolution_backward);
}

} // namespace tessera::internal::shapes
