#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <ranges>
#include <tuple>
#include <type_traits>

namespace tessera {

namespace internal {

template <typename T>
concept Tuple = requires {
  std::tuple_size<T>::value;
};

} // namespace internal

/// The rows of a batch, where its type tells: of a class with `rows()` what that returns; of a tensor its first size; of a class
/// with a tensor `data` (LibTorch's Example) or `inputs`, and of the first part of a pair or a tuple, the same; of a list its
/// length. Nothing for another type.
template <typename Batch>
std::optional<double> rows_of(const Batch& batch) {
  if constexpr (requires { static_cast<double>(batch.rows()); }) {
    return static_cast<double>(batch.rows());
  } else if constexpr (std::is_base_of_v<at::Tensor, Batch>) {
    return batch.dim() == 0 ? 1.0 : static_cast<double>(batch.size(0));
  } else if constexpr (requires { requires std::is_base_of_v<at::Tensor, std::decay_t<decltype(batch.data)>>; }) {
    return rows_of(batch.data);
  } else if constexpr (requires { requires std::is_base_of_v<at::Tensor, std::decay_t<decltype(batch.inputs)>>; }) {
    return rows_of(batch.inputs);
  } else if constexpr (internal::Tuple<Batch>) {
    return rows_of(std::get<0>(batch));
  } else if constexpr (std::ranges::sized_range<const Batch>) {
    return static_cast<double>(std::ranges::size(batch));
  } else {
    return std::nullopt;
  }
}

/// What the loss of a batch is divided by, where its type tells: of a class with `counted()` what that returns (tokens whose
/// target counts); otherwise its rows.
template <typename Batch>
std::optional<double> count_of(const Batch& batch) {
  if constexpr (requires { static_cast<double>(batch.counted()); }) {
    return static_cast<double>(batch.counted());
  } else {
    return rows_of(batch);
  }
}

} // namespace tessera
