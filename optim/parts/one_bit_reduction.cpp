#include <tessera/optim/parts/one_bit_reduction.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <absl/container/flat_hash_set.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/api.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal {

namespace {

constexpr int64_t kBits = 8; ///< signs of a byte

std::string name_of(const at::Tensor& parameter) {
  const auto* meta = dtensor_meta(parameter);
  return meta && meta->provenance.name ? meta->provenance.name->to_string()
                                       : c10::str("a parameter of shape ", parameter.sizes());
}

void check_whole(const at::Tensor& parameter, const std::string& name) {
  const auto* meta = dtensor_meta(parameter);
  if (!meta) return;
  const auto& placements = meta->spec->placements();
  TORCH_CHECK(std::all_of(placements.begin(), placements.end(), is_replicate), name,
              " with sharded parameters: ", name_of(parameter), " is ", to_string(placements),
              "; it reduces between ranks that have each parameter whole (replicate, Strategy::kNoShard)");
}

/// The parameters that may have a gradient, each once.
std::vector<at::Tensor> trained_parameters(const torch::optim::Optimizer& optimizer, const std::string& name) {
  std::vector<at::Tensor> all;
  absl::flat_hash_set<const c10::TensorImpl*> listed;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      if (!parameter.requires_grad() || !listed.insert(parameter.unsafeGetTensorImpl()).second) continue;
      check_whole(parameter, name);
      all.push_back(parameter);
    }
  }
  return all;
}

const DeviceMesh* mesh_of(const std::vector<at::Tensor>& parameters, const std::string& name) {
  const DeviceMesh* mesh = nullptr;
  for (const auto& parameter : parameters) {
    const auto* meta = dtensor_meta(parameter);
    const auto* own = meta ? &meta->spec->mesh() : nullptr;
    if (&parameter == parameters.data()) mesh = own;
    const bool is_same = own == mesh || (own && mesh && *own == *mesh);
    TORCH_CHECK(is_same, name, ": ", name_of(parameter),
                " lies on another mesh than the first parameter, or on none: take an "
                "optimizer for those of each mesh");
  }
  return mesh;
}

/// What a rank tells the others of its gradient.
enum Kind : int { kNone = 0, kOwn = 1, kMean = 2 };

int gradient_kind(const at::Tensor& gradient) {
  if (!gradient.defined()) return kNone;
  const auto* meta = dtensor_meta(gradient);
  return meta && meta->spec->has_partial() ? kOwn : kMean;
}

at::ScalarType wide_dtype(const at::Tensor& parameter) {
  return parameter.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

/// This rank's own gradient. That of a sum counts `ranks` times in a mean.
at::Tensor values_of(const at::Tensor& parameter, int64_t ranks) {
  const auto dtype = wide_dtype(parameter);
  const auto& gradient = parameter.grad();
  if (!gradient.defined()) return at::zeros(parameter.sizes(), part_of(parameter).options().dtype(dtype));
  const auto* meta = dtensor_meta(gradient);
  const bool is_own = meta && meta->spec->has_partial();
  const auto lies_alike = is_own ? gradient : aligned_gradient(parameter);
  auto values = at::empty(parameter.sizes(), part_of(lies_alike).options().dtype(dtype)).copy_(part_of(lies_alike));
  const auto is_sum = [](const Placement& each) { return is_partial(each) && std::get<Partial>(each).op == Partial::Op::kSum; };
  if (is_own && std::any_of(meta->spec->placements().begin(), meta->spec->placements().end(), is_sum))
    values.mul_(static_cast<double>(ranks));
  return values;
}

void check_gradient(const at::Tensor& parameter) {
  const auto& gradient = parameter.grad();
  if (!gradient.defined()) return;
  TORCH_CHECK(gradient.layout() == at::kStrided && !gradient.is_complex(), "the step of an optimizer: the gradient of ",
              name_of(parameter), " is sparse or complex");
  if (auto* meta = dtensor_meta(gradient)) meta->check_has_values("the step of an optimizer");
}

/// Each byte holds eight signs, the first in its lowest bit; `values` has whole bytes of them.
at::Tensor packed(const at::Tensor& values) {
  const auto weights = at::tensor({1, 2, 4, 8, 16, 32, 64, 128}, at::kInt).to(values.device());
  return values.ge(0).to(at::kInt).view({-1, kBits}).mul(weights).sum(-1).to(at::kByte);
}

/// [..., bytes] to [..., 8 · bytes], of 1 and -1.
at::Tensor unpacked(const at::Tensor& bytes, at::ScalarType dtype) {
  const auto weights = at::tensor({1, 2, 4, 8, 16, 32, 64, 128}, at::kInt).to(bytes.device());
  auto sizes = bytes.sizes().vec();
  sizes.back() *= kBits;
  return bytes.to(at::kInt).unsqueeze(-1).bitwise_and(weights).ne(0).to(dtype).mul_(2).sub_(1).reshape(sizes);
}

at::Tensor mean_size(const at::Tensor& values) {
  const auto root = std::sqrt(static_cast<double>(std::max<int64_t>(values.numel(), 1)));
  return at::linalg_vector_norm(values).div_(root).reshape({1});
}

/// Takes the signs and the size of `values` plus what was left, and leaves the rest in `error`. Returns {size, signs in bytes}.
std::pair<at::Tensor, at::Tensor> compressed(const at::Tensor& values, const at::Tensor& error, int64_t bytes) {
  const auto sum = values.add(error), size = mean_size(sum);
  const auto signs = sum.ge(0).to(sum.scalar_type()).mul_(2).sub_(1);
  error.copy_(sum.sub(signs.mul_(size)));
  auto padded = at::zeros({bytes * kBits}, sum.options());
  padded.narrow(0, 0, sum.numel()).copy_(sum);
  return {size, packed(padded)};
}

/// Where the ranks exchange tensors: what is offloaded lies elsewhere.
c10::Device device_of(const Communicator& ranks) { return {ranks.device_type()}; }

/// The columns of one share in a row of what is sent.
struct Columns {
  int64_t size, signs, bytes;
};

/// One call of `one_bit_mean`.
class OneBitMean {
 public:
  OneBitMean(const std::vector<OneBitShare>& shares, Communicator& ranks, const std::string& name)
      : shares_(shares), ranks_(ranks), count_(ranks.size()), label_("one-bit reduction of " + name) {
    dtype_ = shares[0].values.scalar_type();
    const auto itemsize = static_cast<int64_t>(c10::elementSize(dtype_));
    for (const auto& share : shares) {
      const auto bytes = one_bit_part(share.values.numel(), count_) / kBits;
      columns_.push_back({width_, width_ + itemsize, bytes});
      width_ += itemsize + bytes;
    }
    options_ = shares[0].values.options().dtype(at::kByte);
  }

  void run() const {
    const auto sent = at::zeros({count_, width_}, options_);
    for (size_t i = 0; i < shares_.size(); ++i) {
      const auto [size, signs] = compressed(shares_[i].values.view({-1}), shares_[i].worker_error, columns_[i].bytes * count_);
      write(sent, i, size, signs.view({count_, columns_[i].bytes}));
    }
    const auto received = exchanged(sent);
    const auto own = at::zeros({1, width_}, options_);
    for (size_t i = 0; i < shares_.size(); ++i) reduce(i, received, own);
    const auto all = gathered(own);
    for (size_t i = 0; i < shares_.size(); ++i) {
      const auto& values = shares_[i].values;
      values.copy_(scaled(i, all).reshape({-1}).narrow(0, 0, values.numel()).view(values.sizes()));
    }
  }

 private:
  at::Tensor exchanged(const at::Tensor& rows) const {
    const auto sent = rows.to(device_of(ranks_)), received = at::empty_like(sent);
    ranks_.all_to_all(received, sent, {}, {}, label_).wait();
    return received.to(options_.device());
  }
  at::Tensor gathered(const at::Tensor& row) const {
    const auto own = row.to(device_of(ranks_)), all = at::empty({count_, width_}, own.options());
    ranks_.all_gather_into(all.view({-1}), own.view({-1}), label_).wait();
    return all.to(options_.device());
  }
  void write(const at::Tensor& rows, size_t i, const at::Tensor& size, const at::Tensor& signs) const {
    const auto& at_columns = columns_[i];
    rows.narrow(1, at_columns.size, at_columns.signs - at_columns.size).copy_(size.view(at::kByte));
    rows.narrow(1, at_columns.signs, at_columns.bytes).copy_(signs);
  }
  /// The signs of each row times its size.
  at::Tensor scaled(size_t i, const at::Tensor& rows) const {
    const auto& at_columns = columns_[i];
    const auto sizes = rows.narrow(1, at_columns.size, at_columns.signs - at_columns.size).contiguous().view(dtype_);
    return unpacked(rows.narrow(1, at_columns.signs, at_columns.bytes), dtype_).mul_(sizes);
  }
  /// This rank's part of one share.
  void reduce(size_t i, const at::Tensor& received, const at::Tensor& own) const {
    const auto part = columns_[i].bytes * kBits;
    const auto count = std::clamp<int64_t>(shares_[i].values.numel() - ranks_.rank() * part, 0, part);
    const auto mean = scaled(i, received).sum(0).div_(static_cast<double>(count_)).narrow(0, 0, count);
    const auto [size, signs] = compressed(mean, shares_[i].server_error.narrow(0, 0, count), columns_[i].bytes);
    write(own, i, size, signs.view({1, columns_[i].bytes}));
  }

  const std::vector<OneBitShare>& shares_;
  Communicator& ranks_;
  const int64_t count_;
  const std::string label_;
  at::ScalarType dtype_ = at::kFloat;
  at::TensorOptions options_;
  std::vector<Columns> columns_;
  int64_t width_ = 0;
};

} // namespace

namespace {

/// Null where there is one.
CommunicatorPtr reducing_ranks(const DeviceMesh* mesh) {
  return mesh && mesh->size() > 1 ? process_context().communicator(mesh->rank_list(), mesh->device_type()) : nullptr;
}

} // namespace

OwnGradients zeros_in_place_of_gradients(const torch::optim::Optimizer& optimizer, const std::string& name,
                                         const std::function<bool(const at::Tensor&)>& takes) {
  OwnGradients zeros;
  auto parameters = trained_parameters(optimizer, name);
  std::erase_if(parameters, [&](const auto& parameter) { return !takes(parameter); });
  if (parameters.empty()) return zeros;
  zeros.ranks = reducing_ranks(mesh_of(parameters, name));
  for (const auto& parameter : parameters)
    zeros.all.push_back({parameter, at::zeros(parameter.sizes(), part_of(parameter).options().dtype(wide_dtype(parameter)))});
  return zeros;
}

OwnGradients own_gradients(const torch::optim::Optimizer& optimizer, const std::string& name) {
  const auto parameters = trained_parameters(optimizer, name);
  OwnGradients gradients;
  if (parameters.empty()) return gradients;
  const auto* mesh = mesh_of(parameters, name);
  gradients.ranks = reducing_ranks(mesh);
  const auto count = gradients.ranks ? mesh->size() : 1;
  auto kinds = at::zeros({static_cast<int64_t>(parameters.size())}, at::kInt);
  for (size_t i = 0; i < parameters.size(); ++i) {
    check_gradient(parameters[i]);
    kinds.data_ptr<int>()[i] = gradient_kind(parameters[i].grad());
  }
  if (gradients.ranks) {
    const auto on_device = kinds.to(mesh->device());
    gradients.ranks->all_reduce(on_device, ReduceOp::kMax, "the gradients of " + name).wait();
    kinds = on_device.to(at::kCPU);
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    const int kind = kinds.data_ptr<int>()[i];
    if (kind != kNone) gradients.all.push_back({parameters[i], values_of(parameters[i], count), kind == kMean});
  }
  return gradients;
}

void average(OwnGradients& gradients, const std::vector<size_t>& places, const std::string& name) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    std::vector<at::Tensor> flat;
    for (const auto i : places) {
      const auto& each = gradients.all[i];
      if (!each.is_mean && each.values.scalar_type() == dtype) flat.push_back(each.values.view({-1}));
    }
    if (flat.empty() || !gradients.ranks) continue;
    const auto all = at::cat(flat).to(device_of(*gradients.ranks));
    gradients.ranks->all_reduce(all, ReduceOp::kAvg, "the gradients of " + name).wait();
    int64_t position = 0;
    for (const auto& each : flat) {
      each.copy_(all.narrow(0, position, each.numel()));
      position += each.numel();
    }
  }
}

int64_t one_bit_part(int64_t numel, int64_t ranks) { return (numel + kBits * ranks - 1) / (kBits * ranks) * kBits; }

void one_bit_mean(const std::vector<OneBitShare>& shares, Communicator& ranks, const std::string& name) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    std::vector<OneBitShare> alike;
    std::copy_if(shares.begin(), shares.end(), std::back_inserter(alike),
                 [&](const OneBitShare& each) { return each.values.scalar_type() == dtype; });
    if (!alike.empty()) OneBitMean(alike, ranks, name).run();
  }
}

void prepare_errors(const OwnGradient& of, at::Tensor& worker_error, at::Tensor& server_error) {
  if (worker_error.defined()) return;
  const auto* meta = dtensor_meta(of.parameter);
  const int64_t ranks = meta ? meta->spec->mesh().size() : 1, numel = of.values.numel();
  const auto dtype = of.values.scalar_type();
  worker_error = by_rank_zeros(of.parameter, {ranks, numel}, dtype, "worker_error");
  server_error = by_rank_zeros(of.parameter, {ranks, one_bit_part(numel, ranks)}, dtype, "server_error");
}

OneBitShare share_of(const at::Tensor& values, const at::Tensor& worker_error, const at::Tensor& server_error) {
  return {values, part_of(worker_error).view({-1}), part_of(server_error).view({-1})};
}

void add_to(const at::Tensor& parameter, const at::Tensor& update, double factor) {
  const auto* meta = dtensor_meta(parameter);
  const auto own = update.mul(factor).to(parameter.scalar_type());
  parameter.add_(meta ? make_dtensor(own, meta->spec) : own);
}

} // namespace tessera::internal
