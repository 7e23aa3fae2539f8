#include <tessera/dtensor/local_map.h>

#include <tessera/dtensor/tensor/program_scopes.h>

namespace tessera {

std::function<std::vector<DTensor>(const std::vector<DTensor>&)> local_map(const LocalFunction& function,
                                                                           const std::vector<Placements>& outputs,
                                                                           const std::vector<Placements>& inputs,
                                                                           const std::vector<std::vector<int64_t>>& output_sizes,
                                                                           const std::vector<Placements>& input_gradients) {
  TORCH_CHECK(output_sizes.empty() || output_sizes.size() == outputs.size(), "local_map: ", outputs.size(), " outputs, but ",
              output_sizes.size(), " output_sizes");
  TORCH_CHECK(input_gradients.empty() || input_gradients.size() == inputs.size(), "local_map: ", inputs.size(), " inputs, but ",
              input_gradients.size(), " input_gradients");
  TORCH_CHECK(function, "local_map: the function is empty");
  return [=](const std::vector<DTensor>& arguments) {
    TORCH_CHECK(arguments.size() == inputs.size() && !arguments.empty(), "local_map: ", arguments.size(), " arguments for ",
                inputs.size(), " input placements");
    std::vector<at::Tensor> locals;
    for (size_t i = 0; i < arguments.size(); ++i) {
      TORCH_CHECK(
          !internal::program_scopes().strict_sharding || arguments[i].spec().with(inputs[i]).get() == &arguments[i].spec(),
          "local_map: argument ", i, " has the placements ", to_string(arguments[i].placements()), ", not ", to_string(inputs[i]),
          ", and is not moved inside StrictSharding; redistribute it before the call");
      const auto gradient = input_gradients.empty() ? std::nullopt : std::optional(input_gradients[i]);
      locals.push_back(to_local(arguments[i].redistribute(inputs[i]), gradient));
    }
    const auto results = function(locals);
    TORCH_CHECK(results.size() == outputs.size(), "local_map: the function returned ", results.size(), " tensors for ",
                outputs.size(), " output placements");
    std::vector<DTensor> wrapped;
    for (size_t r = 0; r < results.size(); ++r) {
      TORCH_CHECK(results[r].defined(), "local_map: output ", r, " of the function is undefined");
      const auto sizes = output_sizes.empty() ? std::nullopt : std::optional(output_sizes[r]);
      wrapped.push_back(from_local(results[r], arguments[0].mesh(), outputs[r], sizes));
    }
    return wrapped;
  };
}

} // namespace tessera
