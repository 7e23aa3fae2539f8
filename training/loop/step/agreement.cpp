#include <tessera/training/loop/step/agreement.h>

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include <tessera/base/error_text.h>
#include <tessera/base/listing.h>
#include <tessera/collectives/process_context.h>
#include <tessera/collectives/ranks/gather_texts.h>

namespace tessera::internal {

namespace {

bool contains(const std::vector<int64_t>& ranks, int64_t rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

at::Tensor over(std::vector<double>& numbers) {
  return at::from_blob(numbers.data(), {static_cast<int64_t>(numbers.size())}, at::kDouble);
}

} // namespace

Agreement::Agreement(const DeviceMesh& mesh, const DeviceMesh& data_mesh) : mesh_(mesh), data_mesh_(data_mesh) {
  const auto rank = process_context().rank();
  TORCH_CHECK_VALUE(mesh.coordinate(), "Trainer: rank ", rank, " is not in the mesh ", mesh.to_string());
  TORCH_CHECK_VALUE(data_mesh.coordinate(), "Trainer: rank ", rank, " is not in the data mesh ", data_mesh.to_string());
  for (const auto data_rank : data_mesh.ranks()) {
    TORCH_CHECK_VALUE(contains(mesh.ranks(), data_rank), "Trainer: rank ", data_rank, " of the data mesh ", data_mesh.to_string(),
                      " is not in the mesh ", mesh.to_string());
  }
  TORCH_CHECK_VALUE(mesh.size() % data_mesh.size() == 0, "Trainer: the ", data_mesh.size(), " ranks of the data mesh ",
                    data_mesh.to_string(), " do not divide the ", mesh.size(), " of the mesh ", mesh.to_string());
  is_first_copy_ = contains(data_mesh.ranks(), mesh.ranks().front());
  // The numbers are the host's: it need not wait for what the device still computes.
  if (mesh.size() > 1) communicator_ = process_context().communicator(mesh.rank_list(), at::kCPU, "trainer");
}

bool Agreement::is_first() const { return process_context().rank() == mesh_.ranks().front(); }

void Agreement::reduce(std::vector<double>& sums, std::vector<double>& maxima, const char* label) const {
  if (!communicator_) return;
  const auto sum = over(sums), largest = over(maxima);
  if (maxima.empty()) {
    communicator_->all_reduce(sum, ReduceOp::kSum, label).wait();
  } else {
    const auto reduce_both = [&] {
      communicator_->all_reduce(sum, ReduceOp::kSum, label);
      communicator_->all_reduce(largest, ReduceOp::kMax, label);
    };
    communicator_->coalesced(reduce_both).wait();
  }
}

std::vector<std::string> Agreement::texts(const std::string& own) const {
  return communicator_ ? gather_texts(own, *communicator_, at::kCPU, "trainer") : std::vector<std::string>{own};
}

void Agreement::note(const std::string& what, const std::exception_ptr& error) { note(what + ": " + error_text(error)); }

void Agreement::note(const std::string& text) {
  if (failure_.empty()) failure_ = text;
}

void Agreement::throw_failures() {
  const auto all = texts(std::exchange(failure_, ""));
  std::vector<std::string> lines;
  for (size_t i = 0; i < all.size(); ++i) {
    if (!all[i].empty()) lines.push_back(fmt::format("rank {}: {}", mesh_.ranks()[i], all[i]));
  }
  TORCH_CHECK(false, "Trainer: an error on ", lines.size(), " of ", all.size(), all.size() == 1 ? " rank" : " ranks",
              listing(lines));
}

void Agreement::check() {
  std::vector<double> failures{has_failed() ? 1.0 : 0.0}, none;
  reduce(failures, none, "the errors of a trainer");
  if (failures[0] > 0) throw_failures();
}

} // namespace tessera::internal
