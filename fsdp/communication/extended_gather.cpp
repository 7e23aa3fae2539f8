#include <tessera/fsdp/communication/extended_gather.h>

#include <ATen/ceil_div.h>
#include <c10/core/ScalarType.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <sstream>

#include <tessera/collectives/process_context.h>
#include <tessera/collectives/ranks/gather_texts.h>
#include <tessera/fsdp/buffers/flat_views.h>
#include <tessera/fsdp/layout/group_layout.h>

namespace tessera::internal {

std::shared_ptr<GatherExtension> ExtendedGather::extension_of(size_t index) const {
  const auto found = std::find_if(extended_.begin(), extended_.end(), [&](const auto& each) { return each.index == index; });
  return found == extended_.end() ? nullptr : found->extension;
}

std::vector<ExtendedGather::Shape> ExtendedGather::shapes_of(const GatherExtension::Sent& sent) {
  std::vector<Shape> shapes;
  for (const auto& tensor : sent.tensors) shapes.push_back({tensor.scalar_type(), tensor.sizes().vec()});
  return shapes;
}

template <typename Visit>
int64_t ExtendedGather::visit(size_t rank, const Visit& visit) const {
  int64_t offset = 0;
  for (const auto& each : extended_) {
    for (size_t i = 0; i < each.shapes[rank].size(); ++i) {
      const auto& shape = each.shapes[rank][i];
      visit(each, i, offset, shape);
      const auto bytes = c10::multiply_integers(shape.sizes) * static_cast<int64_t>(c10::elementSize(shape.dtype));
      offset = at::round_up(offset + bytes, kParameterAlignment);
    }
  }
  return offset;
}

void ExtendedGather::prepare(const DeviceMesh& mesh, Communicator* communicator, const std::string& label,
                             const std::function<at::Tensor(size_t)>& local, const std::function<std::string(size_t)>& name) {
  std::vector<std::vector<Shape>> mine;
  for (auto& each : extended_) {
    const auto shard = local(each.index);
    each.sent = each.extension->before(shard, mesh);
    for (size_t i = 0; i < each.sent.tensors.size(); ++i) {
      const auto& tensor = each.sent.tensors[i];
      TORCH_CHECK(tensor.defined() && tensor.device() == shard.device() && tensor.layout() == at::kStrided,
                  "the gather extension of ", name(each.index), " sends tensor ", i, " on rank ", process_context().rank(),
                  tensor.defined() ? ", which is not dense, or not on the shard's device" : ", which is undefined");
    }
    mine.push_back(shapes_of(each.sent));
  }
  if (bytes_ == 0) exchange_shapes(mine, mesh, communicator, label, name);
  for (size_t e = 0; e < extended_.size(); ++e) {
    TORCH_CHECK(mine[e] == extended_[e].shapes[rank_], "the gather extension of ", name(extended_[e].index),
                " sends tensors of other shapes or dtypes than in the first gather, on rank ", process_context().rank());
  }
}

std::string ExtendedGather::encode(const std::vector<std::vector<Shape>>& shapes) {
  std::ostringstream text;
  for (const auto& of_parameter : shapes) {
    text << of_parameter.size();
    for (const auto& shape : of_parameter) {
      text << ' ' << static_cast<int>(shape.dtype) << ' ' << shape.sizes.size();
      for (const auto size : shape.sizes) text << ' ' << size;
    }
    text << '\n';
  }
  return text.str();
}

std::vector<ExtendedGather::Shape> ExtendedGather::decode(std::istream& numbers) {
  size_t count = 0;
  numbers >> count;
  std::vector<Shape> shapes(count);
  for (auto& shape : shapes) {
    int dtype = 0;
    size_t dims = 0;
    numbers >> dtype >> dims;
    shape.dtype = static_cast<at::ScalarType>(dtype);
    shape.sizes.resize(dims);
    for (auto& size : shape.sizes) numbers >> size;
  }
  return shapes;
}

void ExtendedGather::exchange_shapes(const std::vector<std::vector<Shape>>& mine, const DeviceMesh& mesh,
                                     Communicator* communicator, const std::string& label,
                                     const std::function<std::string(size_t)>& name) {
  std::vector<std::string> texts{encode(mine)};
  if (communicator) texts = gather_texts(texts[0], *communicator, mesh.device(), label + ": what is gathered");
  rank_ = communicator ? static_cast<size_t>(communicator->rank()) : 0;
  for (auto& each : extended_) each.shapes.clear();
  for (const auto& text : texts) {
    std::istringstream numbers(text);
    for (auto& each : extended_) each.shapes.push_back(decode(numbers));
  }
  const auto same_dtype = [](const Shape& a, const Shape& b) { return a.dtype == b.dtype; };
  for (const auto& each : extended_) {
    for (size_t rank = 1; rank < texts.size(); ++rank) {
      const auto &first = each.shapes[0], &other = each.shapes[rank];
      TORCH_CHECK(std::equal(first.begin(), first.end(), other.begin(), other.end(), same_dtype), "the gather extension of ",
                  name(each.index), " sends other tensors on rank ", rank,
                  " of the shard dim than on rank 0: another number of them, or other dtypes");
    }
  }
  int64_t most = kParameterAlignment;
  for (size_t rank = 0; rank < texts.size(); ++rank) most = std::max(most, visit(rank, [](auto&&...) {}));
  bytes_ = most;
}

void ExtendedGather::write(const at::Tensor& region) {
  visit(rank_, [&](const Extended& each, size_t i, int64_t offset, const Shape& shape) {
    const auto numel = c10::multiply_integers(shape.sizes);
    flat_view(region, offset, numel, shape.dtype).copy_(each.sent.tensors[i].reshape({-1}));
  });
  for (auto& each : extended_) each.sent.tensors.clear();
}

void ExtendedGather::read(const at::Tensor& regions, const std::function<at::Tensor(size_t)>& whole,
                          const std::function<std::string(size_t)>& name) const {
  const auto ranks = static_cast<size_t>(regions.size(0));
  std::vector<std::vector<std::vector<at::Tensor>>> gathered(extended_.size(), std::vector<std::vector<at::Tensor>>(ranks));
  for (size_t rank = 0; rank < ranks; ++rank) {
    visit(rank, [&](const Extended& each, size_t, int64_t offset, const Shape& shape) {
      const auto numel = c10::multiply_integers(shape.sizes);
      auto& tensors = gathered[static_cast<size_t>(&each - extended_.data())][rank];
      tensors.push_back(flat_view(regions[static_cast<int64_t>(rank)], offset, numel, shape.dtype).view(shape.sizes));
    });
  }
  for (size_t e = 0; e < extended_.size(); ++e) {
    const auto& [index, extension, sent, shapes] = extended_[e];
    const auto out = whole(index);
    const auto made = extension->after(gathered[e], sent.metadata, out);
    TORCH_CHECK(made.defined(), "the gather extension of ", name(index), " returned an undefined tensor from `after`");
    TORCH_CHECK(made.sizes() == out.sizes(), "the gather extension of ", name(index), " made a tensor of shape ", made.sizes(),
                ", but the parameter has ", out.sizes());
    if (!made.is_alias_of(out)) out.copy_(made);
  }
}

} // namespace tessera::internal
