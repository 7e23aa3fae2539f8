#include <tessera/training/loop/step/non_finite_search.h>

#include <exception>
#include <optional>
#include <vector>

#include <tessera/base/error_text.h>
#include <tessera/collectives/process_context.h>
#include <tessera/training/nan_guard.h>

namespace tessera::internal {

std::string find_non_finite(const torch::nn::Module& module, const Agreement& agreement, bool is_nan,
                            const std::function<void()>& again) {
  if (agreement.size() != process_context().world_size()) return "";
  std::optional<NanGuard> guard;
  std::vector<double> refused{0}, none;
  try {
    guard.emplace(module, is_nan ? NanGuardWatch::kNan : NanGuardWatch::kNanOrInfinity);
  } catch (const std::exception&) { // one lives already
    refused[0] = 1;
  }
  agreement.reduce(refused, none, "the search for NaN");
  if (refused[0] > 0) return "";
  try {
    again();
  } catch (const std::exception&) { // it may fail where the numbers are not finite; what came before was seen
  }
  try {
    guard->check();
  } catch (const std::exception& error) {
    return error_text(error);
  }
  return "";
}

} // namespace tessera::internal
