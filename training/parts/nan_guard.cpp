#include <tessera/training/nan_guard.h>

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <tessera/collectives/process_context.h>
#include <tessera/collectives/ranks/gather_texts.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/training/parts/nan_search.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

namespace tessera {

namespace {

using internal::NanSearch;

/// A callback of LibTorch's has no state of its own. So the search of the process is here.
class CurrentSearch {
 public:
  void set(const std::shared_ptr<NanSearch>& search) {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(!search_, "NanGuard: there is one already in this process");
    search_ = search;
  }
  void reset() {
    const std::lock_guard lock(mutex_);
    search_.reset();
  }
  std::shared_ptr<NanSearch> get() {
    const std::lock_guard lock(mutex_);
    return search_;
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<NanSearch> search_;
};

CurrentSearch& current_search() {
  static auto* const search = new CurrentSearch; // autograd's threads may outlive statics
  return *search;
}

/// What the search itself calls is neither recorded, differentiated, nor kept for a recomputation, and no autocast or DTensor
/// takes part in it.
struct LookingScope {
  at::DisableRecordFunctionGuard no_record;
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_keeping{internal::kDTensorKey};
};

std::unique_ptr<at::ObserverContext> at_begin(const at::RecordFunction& function) {
  const auto search = current_search().get();
  if (!search) return nullptr;
  const LookingScope scope;
  return search->begin(function);
}

void at_end(const at::RecordFunction& function, at::ObserverContext* context) {
  const auto search = current_search().get();
  if (!search || context == nullptr) return;
  const LookingScope scope;
  search->end(function, static_cast<const NanSearch::Begun&>(*context));
}

/// What a rank says of what it has found: the operator's number, a space and the text.
struct Report {
  int64_t rank = 0, number = 0;
  std::string text;
};

std::vector<Report> gather_reports(const std::string& own) {
  std::vector<std::string> texts{own};
  if (is_initialized() && process_context().world_size() > 1) {
    std::vector<int64_t> ranks(static_cast<size_t>(process_context().world_size()));
    std::iota(ranks.begin(), ranks.end(), 0);
    const auto communicator = process_context().communicator(ranks, at::kCPU, "nan guard");
    const auto all = internal::gather_texts_that_differ(own, *communicator, at::kCPU, "NanGuard");
    texts = all.empty() ? std::vector<std::string>(ranks.size(), own) : all;
  }
  std::vector<Report> reports;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const auto space = texts[rank].find(' ');
    if (space != std::string::npos)
      reports.push_back({static_cast<int64_t>(rank), std::stoll(texts[rank]), texts[rank].substr(space + 1)});
  }
  return reports;
}

} // namespace

NanGuard::NanGuard(const torch::nn::Module& model, NanGuardWatch watch)
    : search_(std::make_shared<NanSearch>(model, watch == NanGuardWatch::kNanOrInfinity)) {
  current_search().set(search_);
  callback_ = at::addThreadLocalCallback(at::RecordFunctionCallback(at_begin, at_end)
                                             .needsInputs(true)
                                             .needsOutputs(true)
                                             .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
}

NanGuard::~NanGuard() {
  at::removeCallback(callback_);
  current_search().reset();
}

void NanGuard::check() {
  const at::DisableRecordFunctionGuard no_record; // nor counted: ranks that have found something do more here
  const auto finding = search_->take();
  auto reports = gather_reports(finding ? c10::str(finding->number, " ", finding->text) : "");
  if (reports.empty()) return;
  std::stable_sort(reports.begin(), reports.end(), [](const auto& a, const auto& b) { return a.number < b.number; });
  std::string text = "NanGuard:";
  for (size_t i = 0; i < reports.size(); ++i) {
    const auto& report = reports[i];
    text += c10::str(i == 0 ? " first on rank " : "\n  then on rank ", report.rank, ": ", report.text, " (operator ",
                     report.number, " since the last check)");
  }
  TORCH_CHECK(false, text);
}

} // namespace tessera
