# Targets of programs in C and C++ that run layers:
#   ecornn::ecornn     opens module files: the headers, and libtvm_ffi.so
#   ecornn::headers    has a layer's static library linked into it
get_filename_component(_ecornn_beside "${CMAKE_CURRENT_LIST_DIR}/../../tvm_ffi" ABSOLUTE)
find_path(ecornn_DLPACK_INCLUDE_DIR dlpack/dlpack.h HINTS "${_ecornn_beside}/include")
find_library(ecornn_TVM_FFI_LIBRARY tvm_ffi HINTS "${_ecornn_beside}/lib")
mark_as_advanced(ecornn_DLPACK_INCLUDE_DIR ecornn_TVM_FFI_LIBRARY)
if(NOT ecornn_DLPACK_INCLUDE_DIR OR NOT ecornn_TVM_FFI_LIBRARY)
  set(ecornn_FOUND FALSE)
  string(CONCAT ecornn_NOT_FOUND_MESSAGE "${_ecornn_beside} has no libtvm_ffi.so and dlpack/dlpack.h: "
                "CMAKE_PREFIX_PATH must name the folder tvm_ffi of the wheel apache-tvm-ffi")
  return()
endif()

if(NOT TARGET ecornn::ecornn)
  add_library(ecornn::headers INTERFACE IMPORTED)
  target_include_directories(ecornn::headers INTERFACE "${CMAKE_CURRENT_LIST_DIR}" "${ecornn_DLPACK_INCLUDE_DIR}")
  target_link_libraries(ecornn::headers INTERFACE -pthread ${CMAKE_DL_LIBS})
  add_library(ecornn::ecornn INTERFACE IMPORTED)
  # the module needs the library, the program does not: the linker must keep it all the same
  target_link_libraries(ecornn::ecornn INTERFACE ecornn::headers -Wl,--no-as-needed "${ecornn_TVM_FFI_LIBRARY}"
                                                 -Wl,--as-needed)
endif()
