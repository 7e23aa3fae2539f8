# Installs the build folder BUILD below WORK, then configures, builds and runs the project CONSUMER against what was installed.
cmake_path(SET prefix NORMALIZE "${WORK}/prefix")
cmake_path(SET build NORMALIZE "${WORK}/build")
file(REMOVE_RECURSE "${WORK}")
set(run COMMAND_ERROR_IS_FATAL ANY COMMAND_ECHO STDOUT)

# A build without its libraries, or with some that are older than libtessera, installs nothing at all.
set(partial "${WORK}/partial")
file(READ "${BUILD}/cmake_install.cmake" script)
string(REPLACE "${BUILD}/lib/" "${partial}/lib/" script "${script}")
file(WRITE "${partial}/cmake_install.cmake" "${script}")
function(expect_nothing_installed why)
  execute_process(COMMAND "${CMAKE_COMMAND}" -D "CMAKE_INSTALL_PREFIX=${partial}/prefix" -P "${partial}/cmake_install.cmake"
    RESULT_VARIABLE status ERROR_VARIABLE error)
  string(REGEX REPLACE "[ \n]+" " " error "${error}")
  if(status EQUAL 0 OR EXISTS "${partial}/prefix" OR NOT error MATCHES "Nothing was installed.* ${why}")
    message(FATAL_ERROR "an install of a partial build ended with ${status} and: ${error}")
  endif()
endfunction()
expect_nothing_installed("is not built yet")
if(script MATCHES "tessera_nccl")
  file(WRITE "${partial}/lib/libtessera_nccl.so" "")
  file(WRITE "${partial}/lib/libtessera.so" "")
  execute_process(COMMAND touch -d "@1" "${partial}/lib/libtessera_nccl.so" ${run})
  expect_nothing_installed("[^ ]*libtessera_nccl.so is older than")
endif()

execute_process(COMMAND "${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${prefix}" OUTPUT_QUIET ${run})
execute_process(COMMAND "${CMAKE_COMMAND}" -G Ninja -S "${CONSUMER}" -B "${build}" -D "CMAKE_PREFIX_PATH=${prefix}"
  -D "CMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER}" ${run})
if(EXISTS "${prefix}/include/tessera/fsdp/schedule.h")
  message(FATAL_ERROR "an internal header was installed: fsdp/schedule/schedule.h")
endif()
execute_process(COMMAND "${CMAKE_COMMAND}" --build "${build}" ${run})

# What it found must be the installed tree, not the source tree.
file(STRINGS "${build}/CMakeCache.txt" found REGEX "^tessera_DIR")
if(NOT found MATCHES "${prefix}")
  message(FATAL_ERROR "the consumer found another Tessera: ${found}")
endif()
foreach(program consumer torch_consumer)
  execute_process(COMMAND "${CMAKE_COMMAND}" -E env --unset=LD_LIBRARY_PATH "${build}/${program}" WORKING_DIRECTORY "${build}" ${run})
endforeach()
