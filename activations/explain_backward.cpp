#include <tessera/activations/explain_backward.h>

#include <absl/algorithm/container.h>
#include <absl/strings/match.h>
#include <c10/util/Exception.h>

namespace tessera::internal {

void explain_backward_error(const std::string& node, std::exception& error) {
  auto* const from_torch = dynamic_cast<c10::Error*>(&error);
  if (!from_torch) return;
  const auto& message = from_torch->msg();
  if (!absl::StrContains(message, "Found dtype ") || !absl::StrContains(message, " but expected ")) return;
  const std::string explanation =
      " in backward: the operator had inputs of these two dtypes, as a loss has of the output of a model under a "
      "mixed-precision policy and of a target in fp32. Cast the output to the target's dtype before the loss, "
      "output.to(target.dtype()), or set the policy's output_dtype and run the forward by tessera::call";
  // The node in whose backward this one ran gets the error too.
  if (absl::c_any_of(from_torch->context(), [&](const auto& line) { return absl::EndsWith(line, explanation); })) return;
  from_torch->add_context(node + explanation);
}

} // namespace tessera::internal
